"""GET /: JSON for programs, a page for browsers."""

import threading

import pytest

from service import __version__
from service.api.root import prefers_html
from tests.service.conftest import MakeBackend, Start, classifying, until

pytestmark = pytest.mark.anyio

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


async def test_it_names_the_service_its_documentation_and_its_models(start: Start, make_backend: MakeBackend) -> None:
    async with start(classifying(make_backend("one"))) as running:
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
                "encode": "judge",
                "generate": "one",
                "similar": "one",
            },
            "failed_models": [],
        }
        assert [(model["id"], "classify" in model["tasks"]) for model in models] == [("judge", True), ("one", False)]
        for path in (root["docs"], root["openapi"]):
            assert (await running.client.get(path)).status_code == 200
        running.app.state.service.drain()
        assert (await running.client.get("/")).json()["status"] == "draining"


async def test_a_browser_gets_a_page_with_the_same(start: Start, make_backend: MakeBackend) -> None:
    backend = make_backend("one", failed={"two": "damaged"})
    backend.manifests = tuple(one.model_copy(update={"description": "<b>&"}) for one in backend.manifests)
    async with start(backend) as running:
        response = await running.client.get("/", headers={"accept": BROWSER})
        assert (response.status_code, response.headers["vary"]) == (200, "Accept")
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        for part in (f"<h1>Sightline {__version__}</h1>", 'href="docs"', 'href="openapi.json"', "one", "load: two."):
            assert part in response.text
        assert "&lt;b&gt;&amp;" in response.text and "<b>" not in response.text


@pytest.mark.parametrize("accept", ["*/*", BROWSER])
async def test_head_has_the_headers_of_get(start: Start, accept: str) -> None:
    async with start() as running:
        get, head = [
            await running.client.request(method, "/", headers={"accept": accept}) for method in ("GET", "HEAD")
        ]
        names = ("content-type", "content-length", "vary")
        assert [head.headers[name] for name in names] == [get.headers[name] for name in names]


async def test_it_answers_while_the_models_load(start: Start, make_backend: MakeBackend) -> None:
    may_load = threading.Event()
    async with start(make_backend("one", wait_for=may_load)) as running:
        try:
            root = (await running.client.get("/")).json()
            assert (root["status"], root["default_model"], root["models"]) == ("loading", None, [])
            assert root["default_models"] == {}
            page = (await running.client.get("/", headers={"accept": BROWSER})).text
            assert "No models are served: loading." in page
        finally:
            may_load.set()
        await until(lambda: running.app.state.service.unavailable_code is None)
        assert [model["id"] for model in (await running.client.get("/")).json()["models"]] == ["one"]


@pytest.mark.parametrize("api", ["", "tei"])
async def test_post_to_it_is_of_a_compatible_api_alone(start: Start, api: str) -> None:
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
    assert prefers_html(accept) is expected
