import re

import pytest

from tests.service.conftest import Start

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("wanted", ["a", "A-b_c.9", "x" * 64])
async def test_a_clients_request_id_is_echoed_where_it_is_fit_to_be_logged(start: Start, wanted: str) -> None:
    async with start() as running:
        answer = await running.client.get("/health/live", headers={"x-request-id": wanted})
        assert answer.headers["x-request-id"] == wanted


@pytest.mark.parametrize("wanted", ["", "x" * 65, "a b", "ä", "a\tb", '{"a":1}'])
async def test_another_is_replaced(start: Start, wanted: str) -> None:
    async with start() as running:
        answer = await running.client.get("/health/live", headers={b"x-request-id": wanted.encode()})
        assert re.fullmatch("[0-9a-f]{24}", answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health/live"),
        ("GET", "/nothing"),
        ("DELETE", "/v1/models"),
        ("GET", "/docs"),
        ("POST", "/v1/generate"),
    ],
)
async def test_every_answer_carries_one(start: Start, method: str, path: str) -> None:
    async with start() as running:
        answers = [await running.client.request(method, path) for _ in range(2)]
        assert len({answer.headers["x-request-id"] for answer in answers}) == 2


async def test_a_route_that_is_asked_for_by_another_method_says_which_it_has(start: Start) -> None:
    async with start() as running:
        answer = await running.client.put("/v1/generate")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/v1/generate/", "//v1/generate", "/V1/generate", "/v1/score/", "/v1/align", "/v1"])
async def test_what_is_no_route_is_404(start: Start, path: str) -> None:
    async with start() as running:
        answer = await running.post(f"http://test{path}", {"inputs": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
