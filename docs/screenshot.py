"""Take the screenshot of the attention page that the README shows: `docs/images/page.png`.

Run as `python -m docs.screenshot`. It serves the shipped bundles and needs Chromium and the extra
`browser`.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from lab.bench.server import serving

OUT = Path("docs/images/page.png")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Chromium runs as root in containers, and must not contact its maker.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WIDTH, HEIGHT = 1180, 900  # pixels of the page


def find_browser() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def take(page: Any, url: str, out: Path) -> None:
    """Open the page, point at a word of the translation, and write a picture of it."""
    page.goto(url)
    page.locator(".navigator canvas").nth(15).wait_for(state="attached")
    page.locator(".alignment .token", has_text="Strand").hover()
    page.screenshot(path=str(out), full_page=True)


def main() -> None:
    from playwright.sync_api import sync_playwright

    with (
        serving(Path("bundles"), default_model="multi30k-en-de") as server,
        sync_playwright() as playwright,
        contextlib.closing(playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)) as browser,
    ):
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        take(page, server.url, OUT)


if __name__ == "__main__":
    main()
