"""The page of the API at `/docs` in a real browser. It needs Chromium."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.bench.server import serving
from sightline.service.keys import add_key

pytestmark = pytest.mark.browser


def test_a_visitor_with_a_key_calls_an_operation_from_the_page(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """`open_page` fails on requests to other hosts, and on what the security policy blocks."""
    keys = [add_key(tmp_path / "keys.json", label, "use") for label in ("visitor", "caller")]
    shutil.copytree("bundles/multi30k-en-de", tmp_path / "bundles" / "multi30k-en-de")
    with serving(tmp_path / "bundles", keys=tmp_path / "keys.json", workers=1) as server:
        page = open_page(f"{server.url}/docs", http_credentials={"username": "", "password": keys[0]})
        page.set_default_timeout(120_000)  # Swagger UI computes for seconds when an operation is opened
        page.get_by_role("button", name="Authorize").click()
        page.get_by_label("auth-bearer-value").fill(keys[1])
        page.get_by_role("button", name="Apply credentials").first.click()
        page.get_by_role("button", name="Close").first.click()
        operation = page.locator("#operations-sightline-show_attention")
        operation.get_by_role("button").first.click()
        operation.locator("textarea").fill(json.dumps({"inputs": "A dog runs.", "kinds": ["cross"]}))
        with page.expect_response(f"{server.url}/v1/attention") as called:
            operation.get_by_role("button", name="Execute").click()
        assert called.value.request.headers["authorization"] == f"Bearer {keys[1]}"
        (output,) = called.value.json()["outputs"]
        assert output["text"] == "Ein Hund rennt."
        operation.locator(".live-responses-table").get_by_text("Ein Hund rennt.").wait_for()
