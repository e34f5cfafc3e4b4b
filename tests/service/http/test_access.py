"""Access by API key: every path needs one, except health checks."""

import asyncio
import base64
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest

from sightline.service import logs
from sightline.service.http.dispatch import EndpointRoute
from sightline.service.keys import remove_key
from tests.service.conftest import Running, Start
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio

KEYS = Path("tests/data/keys.json")
FORM = "application/x-www-form-urlencoded"
OPEN = {
    *("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/ping"),
    "/download_file/{name}",  # whose name is a secret
}
ADMIN = {"/metrics", "/v2/repository/models/{model_name}/load", "/v2/repository/models/{model_name}/unload"}
USE, ADMIN_KEY = {"x-api-key": "sl-alice"}, {"x-api-key": "sl-boss"}
BODY = {"inputs": "x"}


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


def routes(running: Running) -> Iterator[tuple[str, str]]:
    for route in running.app.routes:
        assert isinstance(route, EndpointRoute)
        yield route.declared.method, route.declared.path


@pytest.mark.parametrize("prefix", ["", "/group"])  # such as the route prefix of an application in Ray Serve
async def test_every_route_needs_a_key_and_some_need_the_role_admin(start: Start, tmp_path: Path, prefix: str) -> None:
    async with start(keys=KEYS, model_control="explicit", glossaries=tmp_path) as running:
        transport = httpx.ASGITransport(app=running.app, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            count = 0
            for method, path in routes(running):
                count += 1
                for headers in ({}, {"x-api-key": "sl-nobody"}, {"x-api-key": ""}):
                    response = await client.request(method, prefix + path, headers=headers, json={})
                    assert (response.status_code == 401) == (path not in OPEN), path
                for headers, role in ((USE, "use"), (ADMIN_KEY, "admin")):
                    response = await client.request(method, prefix + path, headers=headers, json={})
                    assert response.status_code != 401, path
                    assert (response.status_code == 403) == (path in ADMIN and role == "use"), path
            assert count > 60


async def test_a_route_that_others_add_needs_a_key(start: Start) -> None:
    async def double(number: int) -> int:
        return 2 * number

    async with start(keys=KEYS) as running:
        running.app.add_api_route("/double/{number}", double)
        for headers, status in (({}, 401), ({"x-api-key": "sl-nobody"}, 401), (USE, 200)):
            assert (await running.client.get("/double/21", headers=headers)).status_code == status


async def test_paths_and_methods_that_do_not_exist_need_a_key_too(start: Start) -> None:
    async with start(keys=KEYS) as running:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/v1/chat/nothing", 404),
            ("PUT", "/v1/generate", 405),
            ("OPTIONS", "/v1/generate", 405),
            ("HEAD", "/docs", 200),
            ("GET", "/health/live/", 404),
            ("GET", "//health/live", 404),
            ("GET", "/page/page.js", None),
            ("GET", "/v1/generate%0A", 404),
        ):
            response = await running.client.request(method, path)
            assert response.status_code == 401, path
            allowed = await running.client.request(method, path, headers=USE)
            assert allowed.status_code not in (401, 403) and status in (None, allowed.status_code), path


@pytest.mark.parametrize(("headers", "status"), read_table(__file__))
async def test_a_key_is_read_from_the_headers_of_common_clients(
    start: Start, headers: dict[str, str], status: int
) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with start(keys=KEYS) as running:
        response = await running.client.post("/v1/generate", json=BODY, headers=encoded)
        assert response.status_code == status
        if status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "unauthorized"


async def test_browsers_ask_for_the_key_of_a_page(start: Start) -> None:
    async with start(keys=KEYS) as running:
        link = {"accept": "text/html", "authorization": basic("sl-alice"), "sec-fetch-site": "cross-site"}
        assert (await running.client.get("/", headers=link)).status_code == 200
        for path in ("/", "/docs", "/nothing"):
            response = await running.client.get(path, headers={"accept": "text/html"})
            assert response.status_code == 401
            assert response.headers["www-authenticate"].startswith('Basic realm="Sightline')


async def test_libretranslate_sends_its_key_in_the_body(start: Start) -> None:
    body = {"q": "x", "source": "en", "target": "de"}
    async with start(keys=KEYS) as running:
        for key, headers, status in (
            (None, {}, 401),
            ("", {}, 401),
            ("sl-nobody", {}, 401),
            ("sl-alice", {}, None),
            ("sl-nobody", USE, None),
            ("sl-alice", {"x-api-key": "sl-nobody"}, 401),
        ):
            for kind in ("json", "data"):
                content: Any = body if key is None else {**body, "api_key": key}
                response = await running.client.request("POST", "/translate", headers=headers, **{kind: content})
                assert (response.status_code == 401) == (status == 401), (key, headers, kind)


@pytest.mark.parametrize(
    ("content", "kind", "query", "status"),  # the last is that of a call with a key
    [
        (b"{}", "application/json", "", 422),
        (b'{"q": 1, "api_key": %s}', "application/json", "", 422),
        (b'{"api_key": %s}', "application/json", "?model=fake", 422),
        (b'{"api_key": 5}', "application/json", "", 422),
        (b"[]", "application/json", "", 422),
        (b"{", "application/json", "", 400),
        (b"", "application/json", "", 400),
        (b"{}", "text/plain", "", 415),
        (b"{}", "application/json", "?x=1", 422),
        (b"a=1", FORM, "", 422),
        (b"api_key=%s&a=1", FORM, "", 422),
        (b"api_key=x&api_key=%s", FORM, "", 422),
        (b"%%FF", FORM, "", 400),
        (b"q=x&" * 99, FORM, "", 400),
    ],
)
async def test_the_key_is_checked_before_the_rest_of_the_body(
    start: Start, content: bytes, kind: str, query: str, status: int
) -> None:
    async with start(keys=KEYS) as running:
        for key, headers in (("sl-nobody", {}), ("sl-alice", {}), ("sl-nobody", USE)):
            quote = b'"%s"' if kind == "application/json" else b"%s"
            body = content.replace(b"%s", quote % key.encode()).replace(b"%%", b"%")
            late = {"content-type": kind, **headers}
            response = await running.client.post("/translate" + query, content=body, headers=late)
            has_key = bool(headers) or (key == "sl-alice" and b"%s" in content and b"=x&" not in content)
            assert response.status_code == (status if has_key else 401), (body, headers)


async def test_a_preflight_needs_no_key_and_its_request_does(start: Start) -> None:
    origin = {"origin": "https://example.org"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with start(keys=KEYS, cors_origins="https://example.org") as running:
        response = await running.client.options("/v1/generate", headers={**origin, **asked})
        assert response.status_code == 200
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        response = await running.client.post("/v1/generate", json=BODY, headers=origin)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, "https://example.org")


async def test_errors_have_the_form_of_the_api(start: Start) -> None:
    async with start(keys=KEYS) as running:
        chat = (await running.client.post("/v1/chat/completions", json={})).json()
        assert chat["error"]["code"] == "unauthorized" and "param" in chat["error"]
        ollama = (await running.client.post("/api/generate", json={})).json()
        assert ollama["error"].startswith("The service needs an API key: send it in the header Authorization")


async def test_logs_and_metrics_have_labels_and_never_keys_or_texts(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    text = "unmistakable"
    async with start(keys=KEYS) as running:
        ok = await running.post("/v1/generate", {"inputs": text}, authorization="Bearer sl-alice")
        wrong = await running.post("/v1/generate", {"inputs": text}, authorization="Bearer sl-mallory")
        invalid = await running.post("/v1/generate", {"inputs": 1}, **{"x-api-key": "sl-alice"})
        in_body = await running.post("/translate", {"q": text, "api_key": "sl-mallory", "source": "en", "target": "de"})
        assert [one.status_code for one in (ok, wrong, invalid, in_body)] == [200, 401, 422, 401]
        metrics = (await running.client.get("/metrics", headers=ADMIN_KEY)).text
    logged = [getattr(record, logs.FIELDS) for record in caplog.records if hasattr(record, logs.FIELDS)]
    calls = [fields for fields in logged if "route" in fields]
    assert [fields.get("key") for fields in calls] == ["alice", None, "alice", None, "boss"]
    assert 'sightline_key_requests_total{key="alice",status="200"} 1.0' in metrics
    assert 'sightline_key_requests_total{key="",status="401"} 2.0' in metrics
    usage = ok.json()["usage"]
    assert f'sightline_key_tokens_total{{key="alice",kind="input"}} {usage["input_tokens"]}.0' in metrics
    shown = [metrics, orjson.dumps(logged, default=str).decode(), caplog.text]
    shown += [one.text for one in (wrong, invalid, in_body)]
    for secret in ("sl-alice", "sl-mallory", "sl-boss", text):
        assert not any(secret in one for one in shown), secret


async def test_a_running_service_follows_the_file(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.service.app.WATCH_INTERVAL_S", 0.01)
    path = tmp_path / "keys.json"
    shutil.copy(KEYS, path)
    async with start(keys=path) as running:
        assert (await running.client.post("/v1/generate", json=BODY, headers=USE)).status_code == 200
        remove_key(path, "alice")
        async with asyncio.timeout(60):
            while (await running.client.post("/v1/generate", json=BODY, headers=USE)).status_code == 200:
                await asyncio.sleep(0.01)
        response = await running.client.post("/v1/generate", json=BODY, headers=ADMIN_KEY)
        assert response.status_code == 200


async def test_without_a_file_no_key_is_needed_or_read(start: Start) -> None:
    async with start() as running:
        for headers in ({}, {"authorization": "Bearer none"}, {"authorization": "nonsense"}):
            assert (await running.client.post("/v1/generate", json=BODY, headers=headers)).status_code == 200
        assert "sightline_key_requests_total{" not in (await running.client.get("/metrics")).text
