"""The header Host, and the headers that protect browsers."""

import pytest

from sightline.service.http.hosts import host_check
from sightline.service.http.http_call import POLLED_ROUTES
from sightline.service.settings import Settings
from tests.service.conftest import Start
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("settings", "allowed", "rejected"), read_table(__file__))
def test_a_host_is_allowed_by_its_name(settings: dict[str, str], allowed: list[str], rejected: list[str]) -> None:
    allows = host_check(Settings(**settings).allowed_host_names)  # type: ignore[arg-type]
    for _ in range(2):  # the second time, the answers are remembered
        assert [host for host in allowed if not allows(host.encode())] == []
        assert [host for host in rejected if allows(host.encode())] == []
    assert allows(None)  # HTTP/1.0


async def test_requests_for_another_host_get_421_on_every_route_but_those_that_monitors_poll(start: Start) -> None:
    async with start(allowed_hosts=None, model_control="explicit") as running:
        for method, path in (
            ("GET", "/"),
            ("GET", "/docs"),
            ("GET", "/v1/models"),
            ("POST", "/v1/generate"),
            ("POST", "/v2/repository/models/fake/unload"),
        ):
            evil = {"host": "evil.example"}
            response = await running.client.request(method, path, headers=evil, json={"inputs": "x"})
            assert response.status_code == 421, path
            assert "The service does not answer requests for this host; use localhost in the URL" in response.text
        response = await running.client.post("/v1/generate", headers={"host": "localhost:1"}, json={"inputs": "x"})
        assert response.status_code == 200
        for path in POLLED_ROUTES:  # by the address of a pod
            assert (await running.client.get(path, headers={"host": "10.0.0.7:8000"})).status_code == 200, path


async def test_browsers_must_not_guess_the_type_of_any_response(start: Start) -> None:
    async with start() as running:
        for method, path, status in (
            ("GET", "/v1/models", 200),
            ("GET", "/docs", 200),
            ("GET", "/metrics", 200),
            ("GET", "/nothing", 404),
            ("PUT", "/v1/generate", 405),
            ("POST", "/v1/generate", 415),
        ):
            response = await running.client.request(method, path)
            assert (response.status_code, response.headers.get_list("x-content-type-options")) == (status, ["nosniff"])
        for path, accept in (("/", "text/html"), ("/page/icon.svg", "*/*")):
            response = await running.client.get(path, headers={"accept": accept})
            assert response.headers.get_list("x-content-type-options") == ["nosniff"]
        picture = await running.client.post(
            "/v1/attention", json={"inputs": "a dog"}, headers={"accept": "image/svg+xml"}
        )
        assert picture.headers["content-type"].startswith("image/svg+xml")
        assert picture.headers.get_list("x-content-type-options") == ["nosniff"]


@pytest.mark.parametrize(("frames", "ancestors"), [(None, "'none'"), ("https://example.org", "https://example.org")])
async def test_the_documentation_runs_only_its_own_scripts_and_is_in_no_frame(
    start: Start, frames: str | None, ancestors: str
) -> None:
    async with start(cors_origins=frames) as running:
        response = await running.client.get("/docs")
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self' data: blob:",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": ancestors,
        }
