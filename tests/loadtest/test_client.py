import asyncio
import time

import pytest

from sightline.loadtest import client as client_module
from sightline.loadtest.client import Client, IncompleteResponseError
from tests.loadtest.fake_service import STREAM_HEAD, FakeService, Piece, Reply, chunk, whole

pytestmark = pytest.mark.anyio


async def test_responses_report_the_status_the_headers_and_the_body() -> None:
    async with FakeService(lambda n, request: whole(422, {"a": 1}, headers="X-Request-Id: r1\r\n")) as service:
        async with Client(service.url, 5.0) as client:
            response = await client.post("/v1/generate", b'{"inputs": "x"}')
        assert (response.status, response.headers["x-request-id"], response.body) == (422, "r1", b'{"a": 1}')
        assert [(request.path, request.body) for request in service.requests] == [("/v1/generate", {"inputs": "x"})]


async def test_pieces_of_a_stream_are_stamped_as_they_arrive() -> None:
    pieces: list[Piece] = [
        STREAM_HEAD,
        0.1,
        chunk(b"first"),
        0.1,
        chunk(b"second")[:4],
        chunk(b"second")[4:],
        b"0\r\n\r\n",
    ]
    async with FakeService(lambda n, request: Reply(pieces)) as service, Client(service.url, 5.0) as client:
        sent = time.perf_counter()
        response = await client.post("/", b"{}")
    assert response.body == b"firstsecond"
    first, last = response.parts[0][0] - sent, response.parts[-1][0] - sent
    assert 0.1 <= first < 0.2
    assert 0.2 <= last <= response.ended - sent < 1


async def test_one_connection_serves_requests_one_after_another() -> None:
    async with FakeService(lambda n, request: whole(200, n)) as service, Client(service.url, 5.0) as client:
        bodies = [(await client.post("/", b"{}")).body for _ in range(5)]
        assert bodies == [b"0", b"1", b"2", b"3", b"4"]
        assert service.connections == 1


async def test_concurrent_requests_have_a_connection_each() -> None:
    async with FakeService(lambda n, request: whole(200, n, 0.05)) as service, Client(service.url, 5.0) as client:
        await asyncio.gather(*(client.post("/", b"{}") for _ in range(4)))
        assert service.connections == 4


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    close = "connection: close\r\n"
    async with FakeService(lambda n, request: whole(200, n, headers=close)) as service:
        async with Client(service.url, 5.0) as client:
            await client.post("/", b"{}")
            await client.post("/", b"{}")
        assert service.connections == 2


async def test_a_client_that_reuses_no_connections_opens_one_for_each_request() -> None:
    async with FakeService(lambda n, request: whole(200, n)) as service:
        async with Client(service.url, 5.0, reuses_connections=False) as client:
            await client.post("/", b"{}")
            await client.post("/", b"{}")
        assert service.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_IDLE_S", 0.05)
    async with FakeService(lambda n, request: whole(200, n)) as service, Client(service.url, 5.0) as client:
        await client.post("/", b"{}")
        await asyncio.sleep(0.1)
        await client.post("/", b"{}")
        assert service.connections == 2


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([], "connection closed before the end of the response"),
        ([STREAM_HEAD, chunk(b"first")], "connection closed before the end of the response"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort"], "connection closed before the end of the response"),
        ([b"SMTP ready\r\n\r\n"], "response is not valid HTTP"),
    ],
)
async def test_an_incomplete_response_is_broken(pieces: list[Piece], reason: str) -> None:
    async with (
        FakeService(lambda n, request: Reply(pieces, closes=True)) as service,
        Client(service.url, 5.0) as client,
    ):
        with pytest.raises(IncompleteResponseError, match=reason):
            await client.post("/", b"{}")


async def test_a_slow_response_times_out_and_its_late_bytes_are_discarded() -> None:
    async with (
        FakeService(lambda n, request: whole(200, n, 0.2 if n == 0 else 0.0)) as service,
        Client(service.url, 0.1) as client,
    ):
        with pytest.raises(TimeoutError):
            await client.post("/", b"{}")
        await asyncio.sleep(0.2)
        assert (await client.post("/", b"{}")).body == b"1"


async def test_a_path_in_the_url_goes_before_the_requests_path() -> None:
    async with FakeService(lambda n, request: whole(200, n)) as service:
        async with Client(service.url + "/translate/", 5.0) as client:
            await client.post("/v1/encode", b"{}")
        assert service.requests[0].path == "/translate/v1/encode"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
async def test_an_invalid_url_of_a_server_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|Port"):
        Client(url, 5.0)
