"""Chromium, controlled with Playwright. Tests are skipped where either is not installed."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.screenshot import BROWSERS, FLAGS, find_browser
from lab.bench.server import RunningServer, serving

MODELS = ("multi30k-en-de", "multi30k-en-de-bahdanau", "multi30k-en-de-luong-local-p", "multi30k-en-de-linformer",
          "multi30k-en-de-fixed-context", "smalltalk-chat-gatt", "sst2-sentiment")  # fmt: skip


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("bundles")
    for name in MODELS:
        shutil.copytree(Path("bundles", name), folder / name)
    with serving(folder, default_model="multi30k-en-de", workers=1) as running:
        yield running


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-browser")
    executable = find_browser()
    if executable is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing(f"none of {', '.join(BROWSERS)} is installed")
    with (
        sync_api.sync_playwright() as playwright,
        contextlib.closing(playwright.chromium.launch(executable_path=executable, args=FLAGS)) as browser,
    ):
        yield browser


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page in a fresh profile, and fail on errors in its console.

    Options are those of Playwright's `new_context`, such as `color_scheme`. `may_fail` allows
    console messages about failed requests, and about styles of documents, which are not applied.
    """
    contexts: list[Any] = []
    problems: list[str] = []

    def open_(url: str, *, may_fail: bool = False, **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()

        def note(message: Any) -> None:
            is_allowed = may_fail and message.text.startswith(("Failed to load resource", "Applying inline style"))
            if message.type in ("error", "warning") and not is_allowed:
                problems.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: _check_host(request.url, url, problems))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def _check_host(requested: str, url: str, problems: list[str]) -> None:
    if not requested.startswith(("blob:", "data:", "/".join(url.split("/")[:3]))):
        problems.append(f"a request to another host: {requested}")
