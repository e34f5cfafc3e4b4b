"""The load test measures a server with known latencies, and reports these."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sightline.loadtest.client import Client
from sightline.loadtest.load import Load, run_load
from sightline.loadtest.load_report import Distribution, summarize
from tests.loadtest.fake_service import (
    DONE,
    STREAM_HEAD,
    FakeService,
    Piece,
    Reply,
    Request,
    chunk,
    final_event,
    token_event,
)

pytestmark = pytest.mark.anyio

FIRST_S, GAP_S, STALL_S, NUM_TOKENS = 0.03, 0.01, 0.025, 5
TOLERANCE_MS = 8  # of the median request; the machine may be busy
LOAD = Load("/v1/generate", [b'{"inputs": "a"}'], is_streamed=True)


def stream(first_s: float) -> Reply:
    """Return a stream with a token each `GAP_S`; the last one comes `STALL_S` after the others."""
    pieces: list[Piece] = [STREAM_HEAD]
    for wait_s in (first_s, *[GAP_S] * (NUM_TOKENS - 2), STALL_S):
        pieces += [wait_s, chunk(token_event())]
    return Reply([*pieces, chunk(final_event(NUM_TOKENS) + DONE) + b"0\r\n\r\n"])


def check(measured: Distribution | None, by_server_s: Sequence[float], planned_s: float, lag_ms: float = 0.0) -> None:
    """Compare the median of measured times with that of the server, whose own timers may be late.

    Times from when a request was due also have the lag of the client.
    """
    assert measured is not None
    median_ms = 1000 * statistics.median(by_server_s)
    assert median_ms >= 1000 * planned_s - 1
    assert median_ms - TOLERANCE_MS <= measured.p50 <= median_ms + TOLERANCE_MS + lag_ms


@pytest.mark.parametrize("load", [replace(LOAD, clients=4, requests=16), replace(LOAD, rates=(60.0,), requests=16)])
async def test_the_times_are_those_of_the_server(load: Load) -> None:
    async with FakeService(lambda n, request: stream(FIRST_S)) as service, Client(service.url, 5.0) as client:
        summary = summarize(await run_load(client, load))
        times = service.times
    assert summary.succeeded == summary.sent == 16
    assert summary.lag_ms is not None
    lag_ms = summary.lag_ms.max
    # The pieces are the head, the tokens and the end.
    check(summary.time_to_first_token_ms, [one[2] - one[0] for one in times], FIRST_S, lag_ms)
    planned_s = FIRST_S + (NUM_TOKENS - 2) * GAP_S + STALL_S
    check(summary.latency_ms, [one[-1] - one[0] for one in times], planned_s, lag_ms)
    check(summary.longest_gap_ms, [one[-2] - one[-3] for one in times], STALL_S)
    rest_s = [(one[-1] - one[2]) / (NUM_TOKENS - 1) for one in times]
    check(summary.time_per_output_token_ms, rest_s, ((NUM_TOKENS - 2) * GAP_S + STALL_S) / (NUM_TOKENS - 1))


async def test_goodput_is_the_share_and_the_rate_of_requests_that_meet_all_objectives() -> None:
    def script(n: int, request: Request) -> Reply:
        """Send the first token of one of four requests late."""
        return stream(FIRST_S if n % 4 else FIRST_S + 0.3)

    async with FakeService(script) as service, Client(service.url, 5.0) as client:
        measurement = await run_load(client, replace(LOAD, clients=32, requests=32))
    loose = {"latency": 5.0, "gap": 5.0}
    summary = summarize(measurement, loose | {"ttft": 0.25})
    assert (summary.succeeded, summary.good, summary.good_share) == (32, 24, 0.75)
    assert summary.good_per_s == pytest.approx(24 / measurement.elapsed_s)
    assert summarize(measurement, loose).good == 32
    assert summarize(measurement, loose | {"gap": STALL_S / 2}).good == 0
    assert summarize(measurement, loose | {"tpot": GAP_S / 2}).good == 0
