"""Take pictures of the page for the README and the guides, in `docs/images`.

Run as `python -m docs.screenshot`. It serves the shipped bundles and needs Chromium and the extra
`browser`.
"""

import contextlib
import shutil
from pathlib import Path

from lab.bench.server import serving

FOLDER = Path("docs/images")
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


def main() -> None:
    from playwright.sync_api import sync_playwright

    with (
        serving(Path("bundles"), default_model="multi30k-en-de") as server,
        sync_playwright() as playwright,
        contextlib.closing(playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)) as browser,
    ):
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(server.url)
        page.get_by_label("Text to translate").fill("Two girls are playing with a small brown dog on the beach.")
        page.get_by_role("button", name="Strand").hover()
        page.locator(".partner").wait_for(state="attached")
        page.locator("body").screenshot(path=FOLDER / "translator.png")
        page.get_by_role("link", name="Look inside").click()
        page.locator(".navigator canvas").nth(15).wait_for(state="attached")
        page.locator(".alignment .token", has_text="Strand").hover()
        page.screenshot(path=FOLDER / "page.png", full_page=True)


if __name__ == "__main__":
    main()
