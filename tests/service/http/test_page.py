"""The page: its files, their headers, and the settings that concern it."""

import re
from pathlib import Path

import pytest

from tests.service.conftest import Start

pytestmark = pytest.mark.anyio

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = {path.name for path in Path("service/page").iterdir() if path.suffix in (".css", ".html", ".js", ".svg")}


def directives(policy: str) -> dict[str, str]:
    return dict(one.strip().partition(" ")[::2] for one in policy.split(";"))


async def test_browsers_get_the_page_and_other_clients_json(start: Start) -> None:
    async with start() as running:
        page = await running.client.get("/", headers=BROWSER)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.text.startswith("<!doctype html>")
        other = await running.client.get("/")
        assert (other.json()["name"], other.headers["content-type"]) == ("Sightline", "application/json")
        for response in (page, other):
            assert response.headers["vary"] == "Accept, Accept-Encoding"


async def test_all_files_are_served_with_their_types_and_named_by_the_page(start: Start) -> None:
    types = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
    async with start() as running:
        for name in FILES:
            response = await running.client.get(f"/page/{name}")
            assert response.status_code == 200
            assert response.headers["content-type"] == f"{types[name.rpartition('.')[2]]}; charset=utf-8"
            assert response.content == Path("service/page", name).read_bytes()
    reached, waiting = set[str](), ["index.html"]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        text = Path("service/page", name).read_text(encoding="utf-8")
        named = re.findall(r'(?:src|href)="page/([^"]+)"|from "\./([^"]+)"', text)
        waiting += [one or other for one, other in named if (one or other) not in reached]
    assert reached == FILES


async def test_nothing_comes_from_other_hosts_and_no_site_may_frame_the_page(start: Start) -> None:
    async with start() as running:
        for path in ("/", "/page/main.js"):
            headers = (await running.client.get(path, headers=BROWSER)).headers
            policy = directives(headers["content-security-policy"])
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert headers["x-content-type-options"] == "nosniff"
    for name in FILES:
        text = Path("service/page", name).read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not re.search(r"https?://|style=\"(?!image-rendering)|\son\w+=", text), name


async def test_the_origins_setting_lists_the_sites_that_may_frame_the_page(start: Start) -> None:
    async with start(cors_origins="null, https://example.org, https://a.example:8080") as running:
        headers = (await running.client.get("/", headers=BROWSER)).headers
        policy = directives(headers["content-security-policy"])
        assert policy["frame-ancestors"] == "https://example.org https://a.example:8080"


async def test_a_cached_page_is_not_modified(start: Start) -> None:
    async with start() as running:
        headers = (await running.client.get("/", headers=BROWSER)).headers
        again = await running.client.get("/", headers={**BROWSER, "if-none-match": headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_a_setting_switches_the_page_off(start: Start) -> None:
    async with start(page=False) as running:
        root = await running.client.get("/", headers=BROWSER)
        assert root.headers["content-type"] == "application/json"
        assert (await running.client.get("/page/main.js")).status_code == 404


@pytest.mark.parametrize("name", ["__init__.py", "nothing.js", "..%2Fapp.py"])
async def test_other_files_are_not_served(start: Start, name: str) -> None:
    async with start() as running:
        response = await running.client.get(f"/page/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
