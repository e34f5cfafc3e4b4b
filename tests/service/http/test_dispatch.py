import re
import threading

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

from tests.service.conftest import MakeBackend, Serve, Start

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("requested", "is_valid"),
    [
        *((text, True) for text in ("a", "A-b_c.9", "x" * 64)),
        *((text, False) for text in ("", "x" * 65, "a b", "ä", "a\tb", '{"a":1}')),
    ],
)
async def test_only_a_valid_request_id_of_a_client_is_returned(start: Start, requested: str, is_valid: bool) -> None:
    async with start() as running:
        response = await running.client.get("/health/live", headers={b"x-request-id": requested.encode()})
        assert re.fullmatch(requested if is_valid else "[0-9a-f]{24}", response.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/health/live"), ("GET", "/nothing"), ("GET", "/docs")),
        *(("DELETE", "/v1/models"), ("POST", "/v1/generate")),
    ],
)
async def test_every_response_has_a_request_id(start: Start, method: str, path: str) -> None:
    async with start() as running:
        responses = [await running.client.request(method, path) for _ in range(2)]
        assert len({response.headers["x-request-id"] for response in responses}) == 2


async def test_another_method_is_an_error_that_lists_the_allowed_ones(start: Start) -> None:
    async with start() as running:
        response = await running.client.put("/v1/generate")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "path", ["/v1/generate/", "//v1/generate", "/V1/generate", "/v1/score/", "/v1/link", "/v1", "/v1/generate%0A"]
)
async def test_an_unknown_path_is_404(start: Start, path: str) -> None:
    async with start() as running:
        response = await running.post(f"http://test{path}", {"inputs": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_every_route_is_an_api_route(start: Start) -> None:
    """A plain route of Starlette, or a mounted application, would need no key."""
    async with start() as running:
        for route in running.app.routes:
            assert isinstance(route, APIRoute)


async def test_a_parameter_does_not_match_a_path_of_another_route(start: Start) -> None:
    async with start() as running:
        routes = [route for route in running.app.routes if isinstance(route, APIRoute)]
        for path in {route.path for route in routes if "{" not in route.path}:
            scope = {"type": "http", "method": "GET", "path": path}
            assert next(route.path for route in routes if route.matches(scope)[0] != Match.NONE) == path


@pytest.mark.parametrize("path", ["/health/live%0A", "/v2/models/fake/ready%0A"])
async def test_a_line_break_belongs_to_a_path(start: Start, path: str) -> None:
    async with start() as running:
        assert (await running.client.get(f"http://test{path}")).status_code == 404


async def test_an_ordinary_route_of_fastapi_can_be_added(start: Start) -> None:
    async with start() as running:

        async def double(number: int) -> int:
            return 2 * number

        running.app.add_api_route("/double/{number}", double)
        response = await running.client.get("/double/21", headers={"x-request-id": "me"})
        assert (response.json(), response.headers["x-request-id"]) == (42, "me")
        assert (await running.client.get("/double/x")).status_code == 422


GET_ROUTES = [
    *("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/docs", "/openapi.json", "/v1/models"),
    *("/v1/models/fake", "/v2", "/v2/health/live", "/v2/health/ready", "/info", "/languages"),
]


def test_head_has_the_response_of_get_without_the_body(serve: Serve) -> None:
    with serve() as wire:
        connection = wire.http()
        for path in GET_ROUTES:
            connection.request("GET", path)
            whole = connection.getresponse()
            size = len(whole.read())
            connection.request("HEAD", path)
            head = connection.getresponse()
            assert (head.status, head.read()) == (whole.status, b""), path
            assert head.headers.keys() == whole.headers.keys()
            assert head.headers["Content-Type"] == whole.headers["Content-Type"]
            assert path == "/metrics" or int(head.headers["Content-Length"]) == size > 0
        for path, status in (("/v1/generate", 405), ("/nothing", 404)):
            connection.request("HEAD", path)
            response = connection.getresponse()
            assert (response.status, response.read()) == (status, b"")
        connection.close()


def test_head_reports_readiness(serve: Serve, make_backend: MakeBackend) -> None:
    may_load = threading.Event()
    with serve(make_backend(wait_for=may_load)) as wire:
        connection = wire.http()
        connection.request("HEAD", "/health/ready")
        response = connection.getresponse()
        assert (response.status, response.read(), response.headers["Retry-After"]) == (503, b"", "1")
        may_load.set()
        connection.close()


async def test_head_is_logged_as_head(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="sightline.access")
    async with start() as running:
        await running.client.head("/health/live")
        (call,) = [record.fields for record in caplog.records if record.name == "sightline.access"]  # type: ignore[attr-defined]
        assert (call["method"], call["route"], call["status"]) == ("HEAD", "/health/live", 200)
