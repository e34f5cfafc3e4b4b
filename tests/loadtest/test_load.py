import random
import time

import pytest

from sightline.loadtest.client import Client
from sightline.loadtest.load import ARRIVALS_SEED, Load, Measurement, run_load
from sightline.loadtest.load_report import summarize
from sightline.loadtest.outcome import Failure, Rejection, Success
from tests.loadtest.fake_service import (
    DONE,
    STREAM_HEAD,
    FakeService,
    Piece,
    Reply,
    Request,
    chunk,
    final_event,
    rejection,
    token_event,
    translation,
)

pytestmark = pytest.mark.anyio

BODIES = [b'{"inputs": "a"}', b'{"inputs": "b"}', b'{"inputs": "c"}']


async def run(service: FakeService, load: Load, timeout_s: float = 5.0) -> Measurement:
    async with Client(service.url, timeout_s) as client:
        return await run_load(client, load)


async def test_bodies_are_sent_in_order_and_again_from_the_start_over_all_clients() -> None:
    async with FakeService(lambda n, request: translation(wait_s=0.01)) as service:
        measurement = await run(service, Load("/v1/generate", BODIES, clients=2, requests=7))
        assert [request.body["inputs"] for request in service.requests] == ["a", "b", "c", "a", "b", "c", "a"]
        assert {request.path for request in service.requests} == {"/v1/generate"}
        assert len(measurement.outcomes) == 7


async def test_each_client_waits_for_its_response_before_the_next_request() -> None:
    async with FakeService(lambda n, request: translation(wait_s=0.1)) as service:
        measurement = await run(service, Load("/", BODIES, clients=4, requests=12))
        assert service.connections == 4
    assert measurement.elapsed_s >= 0.3
    summary = summarize(measurement)
    assert summary.latency_ms is not None
    assert 100 <= summary.latency_ms.p50 <= 1000 * measurement.elapsed_s / 2  # a client has two above the median
    assert summary.requests_per_s == pytest.approx(12 / measurement.elapsed_s)
    assert summary.output_tokens_per_s == pytest.approx(5 * summary.requests_per_s)


async def test_after_the_duration_no_request_is_sent_and_running_ones_finish() -> None:
    async with FakeService(lambda n, request: translation(wait_s=0.2)) as service:
        measurement = await run(service, Load("/", BODIES, clients=3, duration_s=0.3))
        assert len(measurement.outcomes) == len(service.requests) <= 6  # fewer on a slow machine
    assert all(isinstance(outcome, Success) for outcome in measurement.outcomes)
    assert measurement.elapsed_s >= 0.4


async def test_the_times_of_a_stream_are_those_of_its_events_though_they_arrive_in_pieces() -> None:
    event = token_event("Mädchen")
    inside_character = event.index(b"\xc3") + 1
    pieces: list[Piece] = [
        STREAM_HEAD,
        0.1,
        chunk(event[:inside_character]),
        chunk(event[inside_character:]),
        0.1,
        chunk(token_event()),
        0.1,
        chunk(token_event() + final_event(3)[:9]),
        chunk(final_event(3)[9:] + DONE)[:5],
        chunk(final_event(3)[9:] + DONE)[5:],
        b"0\r\n\r\n",
    ]
    async with FakeService(lambda n, request: Reply(pieces)) as service:
        measurement = await run(service, Load("/", BODIES, is_streamed=True, requests=2))
    for outcome in measurement.outcomes:
        assert isinstance(outcome, Success)
        assert outcome.output_tokens == 3
        assert outcome.first_token_s is not None
        assert outcome.per_output_token_s is not None
        assert 0.1 <= outcome.first_token_s < outcome.latency_s
        assert outcome.latency_s >= 0.3
        assert outcome.per_output_token_s == pytest.approx((outcome.latency_s - outcome.first_token_s) / 2)


async def test_a_rejected_client_pauses_and_continues_with_the_next_request() -> None:
    async with FakeService(lambda n, request: rejection("overloaded", 9) if n == 0 else translation()) as service:
        measurement = await run(service, Load("/", BODIES, requests=3))
        assert [request.body["inputs"] for request in service.requests] == ["a", "b", "c"]
    assert [type(outcome) for outcome in measurement.outcomes] == [Rejection, Success, Success]
    assert measurement.elapsed_s < 9


async def test_a_client_that_honors_retry_after_waits_and_sends_the_same_request_again() -> None:
    async with FakeService(lambda n, request: rejection("overloaded", 1) if n == 0 else translation()) as service:
        measurement = await run(service, Load("/", BODIES, requests=2, honors_retry_after=True))
        assert [request.body["inputs"] for request in service.requests] == ["a", "a", "b"]
    assert [type(outcome) for outcome in measurement.outcomes] == [Rejection, Success, Success]
    assert measurement.elapsed_s >= 1


async def test_no_client_waits_for_a_retry_beyond_the_end() -> None:
    async with FakeService(lambda n, request: rejection("draining", 60)) as service:
        load = Load("/", BODIES, duration_s=0.2, honors_retry_after=True)
        measurement = await run(service, load)
    assert measurement.outcomes == [Rejection("draining", 60)]
    assert measurement.elapsed_s < 60


async def test_broken_late_and_missing_responses_are_failures_and_the_load_continues() -> None:
    replies = [
        Reply([STREAM_HEAD, chunk(token_event())], closes=True),
        Reply([STREAM_HEAD, chunk(token_event()), b"0\r\n\r\n"]),
        Reply([STREAM_HEAD, chunk(token_event()), 1.5, b"0\r\n\r\n"]),
        Reply([STREAM_HEAD, chunk(token_event() + final_event(1) + DONE), b"0\r\n\r\n"]),
    ]
    async with FakeService(lambda n, request: replies[n]) as service:
        measurement = await run(service, Load("/", BODIES, is_streamed=True, requests=4), timeout_s=0.5)
    assert measurement.outcomes[:3] == [
        Failure("connection closed before the end of the response"),
        Failure("incomplete stream"),
        Failure("timeout"),
    ]
    assert isinstance(measurement.outcomes[3], Success)
    assert (await run(service, Load("/", BODIES, requests=1))).outcomes == [Failure("connection failed")]


async def test_an_open_loop_keeps_its_rate_with_a_slow_service() -> None:
    async with FakeService(lambda n, request: translation(wait_s=0.5)) as service:
        measurement = await run(service, Load("/", BODIES, rates=(100.0,), duration_s=1.0))
    assert 70 <= len(measurement.outcomes) <= 130  # three standard deviations
    assert 1.3 <= measurement.elapsed_s < 30  # one request after the other would take 50 s


async def test_an_open_loop_is_due_at_the_same_times_in_every_run() -> None:
    arrivals = random.Random(ARRIVALS_SEED)
    last_due_s = sum(arrivals.expovariate(20.0) for _ in range(10))
    async with FakeService(lambda n, request: translation()) as service:
        for _ in range(3):
            measurement = await run(service, Load("/", BODIES, rates=(20.0,), requests=10))
            assert last_due_s <= measurement.elapsed_s < last_due_s + 5


async def test_latency_in_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """Latency includes the delay of a request that a blocked event loop sends late."""

    def block_once(n: int, request: Request) -> Reply:
        if n == 0:
            time.sleep(0.3)
        return translation()

    async with FakeService(block_once) as service:
        measurement = await run(service, Load("/", BODIES, rates=(50.0,), requests=10))
    summary = summarize(measurement)
    assert summary.latency_ms is not None
    assert summary.latency_ms.p50 > 50


@pytest.mark.parametrize("load", [Load("/", BODIES, rates=(100.0,), requests=30), Load("/", BODIES, duration_s=0.3)])
async def test_a_client_that_cannot_run_has_a_lag(load: Load) -> None:
    """The server blocks the event loop of the client for most of the time."""

    def block_once(n: int, request: Request) -> Reply:
        if n == 5:
            time.sleep(0.2)
        return translation(wait_s=0.01)

    async with FakeService(block_once) as service:
        lag = summarize(await run(service, load)).lag_ms
    assert lag is not None
    assert lag.max > 150
    assert lag.p95 > 100 > lag.p50 / 2


async def test_requests_that_are_sent_behind_their_schedule_have_a_lag() -> None:
    """All requests are due within a millisecond, but each turn of the event loop sends one."""
    async with FakeService(lambda n, request: translation()) as service:
        measurement = await run(service, Load("/", BODIES, rates=(1e6,), requests=300))
    assert len(measurement.lags_s) >= 300
    lag = summarize(measurement).lag_ms
    assert lag is not None and lag.p50 > 5
