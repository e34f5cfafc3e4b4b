"""GET /: JSON for programs; `http/test_page.py` tests the page for browsers. The header Accept."""

import threading

import pytest

from sightline import __version__
from sightline.service.api.endpoint import HTML, prefers
from tests.service.conftest import MakeBackend, Start, classifying, until

pytestmark = pytest.mark.anyio

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


async def test_it_names_the_service_its_documentation_and_its_models(start: Start, make_backend: MakeBackend) -> None:
    async with start(classifying(make_backend("one")), default_model="one") as running:
        response = await running.client.get("/")
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        root = response.json()
        models = root.pop("models")
        assert root == {
            "name": "Sightline",
            "version": __version__,
            "status": "ready",
            "docs": "/docs",
            "openapi": "/openapi.json",
            "default_model": "one",
            "default_models": {
                "attention": "one",
                "classify": "judge",
                "encode": "one",
                "generate": "one",
            },
            "failed_models": [],
        }
        assert [(model["id"], "classify" in model["tasks"]) for model in models] == [("judge", True), ("one", False)]
        for path in (root["docs"], root["openapi"]):
            assert (await running.client.get(path)).status_code == 200
        running.app.state.service.drain()
        assert (await running.client.get("/")).json()["status"] == "draining"


@pytest.mark.parametrize("accept", ["*/*", BROWSER])
async def test_head_has_the_headers_of_get(start: Start, accept: str) -> None:
    async with start() as running:
        get, head = [
            await running.client.request(method, "/", headers={"accept": accept}) for method in ("GET", "HEAD")
        ]
        names = ("content-type", "content-length", "vary")
        assert [head.headers[name] for name in names] == [get.headers[name] for name in names]


async def test_the_root_responds_while_models_load(start: Start, make_backend: MakeBackend) -> None:
    may_load = threading.Event()
    async with start(make_backend("one", wait_for=may_load)) as running:
        try:
            root = (await running.client.get("/")).json()
            assert (root["status"], root["default_model"], root["models"]) == ("loading", None, [])
            assert root["default_models"] == {}
        finally:
            may_load.set()
        await until(lambda: running.app.state.service.unavailable_code is None)
        assert [model["id"] for model in (await running.client.get("/")).json()["models"]] == ["one"]


@pytest.mark.parametrize("api", ["", "tei"])
async def test_post_to_the_root_needs_a_compatible_api(start: Start, api: str) -> None:
    async with start(compatible_apis=api) as running:
        response = await running.post("/", {"inputs": "x"})
        assert response.status_code == (200 if api else 405)
        if not api:
            assert response.headers["allow"] == "GET"


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
