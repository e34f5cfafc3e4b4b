"""Preference of media types in the header Accept."""

import pytest

from sightline.service.api.endpoint import HTML, prefers

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/*", False),
        ("text/html", True),
        (BROWSER, True),
        ("TEXT/HTML; charset=utf-8", True),
        ("application/json, text/html", True),
        ("application/json, text/html;q=0.9", False),
        ("application/json;q=0.1, text/html; q=0.9", True),
        ("text/html;q=0", False),
        ("text/html;q=x", False),
    ],
)
def test_html_is_for_clients_that_prefer_it(accept: str, expected: bool) -> None:
    assert prefers(HTML, {b"accept": accept.encode()}) is expected
