"""CORS: no other origin is allowed by default; responses to allowed origins have CORS headers."""

import asyncio
import threading

import httpx2 as httpx
import pytest

from sightline.base.errors import UsageError
from sightline.service.settings import make_settings
from tests.service.conftest import MakeBackend, Running, Serve, Start, until
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio

PAGE = "https://page.example"
ALLOWED = "access-control-allow-origin"


async def preflight(running: Running, path: str = "/v1/generate", **changes: str) -> httpx.Response:
    """As a browser asks before it sends a request that a page makes."""
    headers = {"origin": PAGE, "access-control-request-method": "POST", **changes}
    return await running.client.options(path, headers=headers)


async def test_no_page_of_another_origin_may_call_by_default(start: Start) -> None:
    async with start() as running:
        response = await running.post("/v1/generate", {"inputs": "x"}, origin=PAGE)
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control-")]
        response = await preflight(running)
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
        assert "SIGHTLINE_CORS_ORIGINS" in response.text
        assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(("origins", "allowed"), [(PAGE, PAGE), (f"http://localhost:3000, {PAGE}", PAGE), ("*", "*")])
async def test_a_page_of_an_allowed_origin_may_read_responses_and_their_headers(
    start: Start, origins: str, allowed: str
) -> None:
    async with start(cors_origins=origins) as running:
        for response in (
            await running.post("/v1/generate", {"inputs": "x"}, origin=PAGE),
            await running.post("/v1/generate", {"inputs": "x", "stream": True}, origin=PAGE),
            await running.client.get("/v1/models", headers={"origin": PAGE}),
        ):
            assert (response.status_code, response.headers[ALLOWED]) == (200, allowed)
            exposed = "Retry-After, X-Request-Id, X-Sightline-Repaired, X-Sightline-Warning"
            assert response.headers["access-control-expose-headers"] == exposed
            assert "Origin" in response.headers["vary"]
            assert "access-control-allow-credentials" not in response.headers
            assert response.headers["x-request-id"]


async def test_a_page_from_a_file_may_call_if_the_origin_null_is_allowed(start: Start) -> None:
    async with start(cors_origins="null") as running:
        response = await running.post("/v1/generate", {"inputs": "x"}, origin="null")
        assert (response.status_code, response.headers[ALLOWED]) == (200, "null")
        response = await preflight(running, origin="null")
        assert (response.status_code, response.headers[ALLOWED]) == (200, "null")
        assert ALLOWED not in (await running.post("/v1/generate", {"inputs": "x"}, origin=PAGE)).headers


@pytest.mark.parametrize("origin", ["https://other.example", "http://page.example", f"{PAGE}:8443", "null", ""])
async def test_a_page_of_another_origin_gets_no_permission(start: Start, origin: str) -> None:
    async with start(cors_origins=PAGE) as running:
        response = await running.post("/v1/generate", {"inputs": "x"}, origin=origin)
        assert ALLOWED not in response.headers
        response = await preflight(running, origin=origin)
        assert response.status_code == 400 and "SIGHTLINE_CORS_ORIGINS" in response.text
        assert ALLOWED not in response.headers


async def test_a_browser_may_send_json_and_the_headers_of_client_libraries(start: Start) -> None:
    headers = "authorization,content-type,x-request-id,x-request-timeout-ms,x-stainless-lang"
    async with start(cors_origins=PAGE) as running:
        for path in ("/v1/generate", "/v1/completions", "/translate"):
            response = await preflight(running, path, **{"access-control-request-headers": headers})
            assert (response.status_code, response.headers[ALLOWED]) == (200, PAGE)
            assert response.headers["access-control-allow-headers"] == headers
            assert response.headers["access-control-allow-methods"] == "GET, POST"
            assert int(response.headers["access-control-max-age"]) >= 600
            assert "access-control-allow-credentials" not in response.headers
        assert (await preflight(running, **{"access-control-request-method": "DELETE"})).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/generate", b"{", 400),
        ("POST", "/v1/nothing", b"{}", 404),
        ("POST", "/v1/generate", b'{"inputs": "x", "model": "y"}', 404),
        ("GET", "/v1/generate", None, 405),
        ("POST", "/v1/generate", b'{"inputs": "' + b"x" * 5000 + b'"}', 413),
        ("POST", "/v1/generate", b'{"inputs": ""}', 422),
    ],
)
async def test_errors_have_cors_headers(start: Start, method: str, path: str, body: bytes | None, status: int) -> None:
    async with start(cors_origins=PAGE, max_body_bytes=4000) as running:
        headers = {"origin": PAGE, "content-type": "application/json"}
        response = await running.client.request(method, path, content=body, headers=headers)
        assert (response.status_code, response.headers[ALLOWED]) == (status, PAGE)
        assert response.json()["error"]["request_id"] == response.headers["x-request-id"]


async def test_errors_of_overload_deadlines_and_bugs_have_cors_headers(start: Start, make_backend: MakeBackend) -> None:
    async def call(running: Running) -> tuple[int, str, str | None]:
        response = await running.post("/v1/generate", {"inputs": "x"}, origin=PAGE)
        return response.status_code, response.headers[ALLOWED], response.headers.get("retry-after")

    loading, hang = threading.Event(), threading.Event()
    async with start(make_backend(wait_for=loading), cors_origins=PAGE) as running:
        assert await call(running) == (503, PAGE, "1")
        loading.set()
    async with start(make_backend(faults=Faults(step_calls=frozenset({1}))), cors_origins=PAGE) as running:
        assert (await call(running))[:2] == (500, PAGE)
    limits = {"max_rows": 1, "max_waiting_sequences": 1, "request_timeout_s": 0.5, "queue_timeout_s": 0.5}
    async with start(make_backend(faults=Faults(hang=hang)), cors_origins=PAGE, **limits) as running:
        try:
            held = [asyncio.create_task(call(running)) for _ in range(2)]
            await until(lambda: running.backend.num_busy == 2)
            assert (await call(running))[:2] == (429, PAGE)
            assert {status for status, *_ in await asyncio.gather(*held)} <= {429, 504}
        finally:
            hang.set()


async def test_an_error_in_a_stream_ends_it_with_cors_enabled(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend(faults=Faults(step_calls=frozenset({4}))), cors_origins=PAGE) as running:
        body = {"inputs": "x", "stream": True, "parameters": {"min_new_tokens": 20}}
        response = await running.post("/v1/generate", body, origin=PAGE)
        assert (response.status_code, response.headers[ALLOWED]) == (200, PAGE)
        assert "event: error" in response.text and "[DONE]" not in response.text


async def test_preflights_are_counted_and_logged_like_any_call(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sightline.access")
    async with start(cors_origins=PAGE) as running:
        response = await preflight(running)
        await preflight(running, origin="https://other.example")
        logged = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
        assert [(one["method"], one["route"], one["status"]) for one in logged] == [
            ("OPTIONS", "none", 200),
            ("OPTIONS", "none", 400),
        ]
        assert logged[0]["request_id"] == response.headers["x-request-id"]
        assert await running.metric('sightline_http_requests_total{route="none",status="200"}') == 1
        assert await running.metric('sightline_http_requests_total{route="none",status="400"}') == 1


def test_the_head_of_a_stream_on_the_wire_has_cors_headers(serve: Serve) -> None:
    with serve(cors_origins=PAGE) as wire:
        connection = wire.http()
        headers = {"Content-Type": "application/json", "Origin": PAGE}
        connection.request("POST", "/v1/generate", b'{"inputs": "a dog", "stream": true}', headers)
        response = connection.getresponse()
        assert (response.status, response.headers.get_all(ALLOWED)) == (200, [PAGE])
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()


@pytest.mark.parametrize(
    "value",
    [
        *("page.example", "https://page.example/", "https://page.example/path", "https://", "//page.example", "Null"),
        *("https://page.example?x", "https://user@page.example", "HTTPS://page.example", "https://Page.example"),
        *("https://page.example:443", "http://localhost:80", "https://page.example:", "https://page.example:x"),
        *("https://*.example", f"{PAGE};https://other.example", f"{PAGE},other", f"{PAGE} https://other.example", "**"),
    ],
)
def test_an_invalid_origin_is_rejected_at_the_start(value: str) -> None:
    with pytest.raises(UsageError, match=r"SIGHTLINE_CORS_ORIGINS: .* is not an origin as browsers send it"):
        make_settings({}, {"SIGHTLINE_CORS_ORIGINS": value})


@pytest.mark.parametrize(
    ("value", "origins"),
    [
        ("", ()),
        (" * ", ("*",)),
        (f" {PAGE} ,http://localhost:8080,", (PAGE, "http://localhost:8080")),
        ("http://127.0.0.1:443,http://[::1]:3000", ("http://127.0.0.1:443", "http://[::1]:3000")),
        ("moz-extension://0a1b-2c", ("moz-extension://0a1b-2c",)),
        ("http://my_host.internal", ("http://my_host.internal",)),
        (f"null,{PAGE}", ("null", PAGE)),
    ],
)
def test_origins_are_separated_by_commas(value: str, origins: tuple[str, ...]) -> None:
    assert make_settings({"cors_origins": value}, {}).allowed_origins == origins
