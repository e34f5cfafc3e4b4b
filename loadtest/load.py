"""Closed-loop and open-loop load.

In a closed loop, each of a number of clients sends its next request after the response to the last
one, so that the service determines the rate. In an open loop, requests are due at random times with
given mean rates (a Poisson process), independent of the service. Latency is measured from the time
when a request was due, so that it includes the delay of a late start.

A client that is too slow measures itself instead of the service. Therefore, the lag of the client
is recorded: the delay of a timer, and in an open loop also that of each request behind its
schedule.
"""

import asyncio
import errno
import itertools
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sightline.loadtest.client import Client, IncompleteResponseError
from sightline.loadtest.outcome import OWN, Failure, Outcome, Rejection, Success, classify

PAUSE_S = 0.05  # pause of a client after a rejection or failure, so that it does not flood a failing service
TICK_S = 0.01  # interval of the timer that measures the lag
ARRIVALS_SEED = 20
# Files, ports and memory that the machine of the load test does not have.
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Load:
    """Requests to send; the load ends after its duration or `requests`, whichever comes first.

    Args:
        bodies: bodies of the requests, sent cyclically in this order.
        clients: number of clients of a closed loop.
        rates: requests per second of an open loop, one rate after another without a pause; none
            means a closed loop.
        duration_s: duration in seconds, or that of each rate. Later, no request is sent; pending
            responses are awaited.
        requests: number of requests to send, without repetitions.
        honors_retry_after: after a rejection, a client of a closed loop waits for `Retry-After` and
            repeats the request.
        has_usage: see `classify`.
    """

    path: str
    bodies: Sequence[bytes]
    is_streamed: bool = False
    clients: int = 1
    rates: Sequence[float] = ()
    duration_s: float = math.inf
    requests: int | None = None
    honors_retry_after: bool = False
    has_usage: bool = True


@dataclass
class Measurement:
    """Results of a load, in the order in which requests ended; times are seconds.

    Args:
        elapsed_s: time from the first request to the last response.
        due_s: time when each request was due, from the start.
        lags_s: delays of the client, see the module.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    elapsed_s: float = 0.0
    due_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)


async def run_load(client: Client, load: Load) -> Measurement:
    """Send the requests of a load and wait for all responses."""
    run = _Run(client, load)
    ticker = asyncio.create_task(run.tick())
    try:
        await (run.open_loop() if load.rates else run.closed_loop())
    finally:
        ticker.cancel()
    run.measurement.elapsed_s = time.perf_counter() - run.started
    return run.measurement


def arrival_times(rates: Sequence[float], duration_s: float) -> Iterator[float]:
    """Yield the times of a Poisson process with one rate after another, in seconds from the start.

    The times are the same in every call.
    """
    arrivals = random.Random(ARRIVALS_SEED)  # noqa: S311 - a schedule, not a secret
    for index, rate in enumerate(rates):
        start = index * duration_s if index else 0.0
        due = start + arrivals.expovariate(rate)
        while due < start + duration_s:
            yield due
            due += arrivals.expovariate(rate)


class _Run:
    def __init__(self, client: Client, load: Load) -> None:
        self._client = client
        self._load = load
        self.measurement = Measurement()
        self.started = time.perf_counter()

    async def open_loop(self) -> None:
        load, bodies = self._load, itertools.cycle(self._load.bodies)
        async with asyncio.TaskGroup() as group:
            for time_s in itertools.islice(arrival_times(load.rates, load.duration_s), load.requests):
                due = self.started + time_s
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._send_at(next(bodies), due))

    async def closed_loop(self) -> None:
        turns = itertools.islice(itertools.cycle(self._load.bodies), self._load.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.clients):
                group.create_task(self._send_in_turn(turns, self.started + self._load.duration_s))

    async def tick(self) -> None:
        """Record the lag of a timer. Ticks that are missed count, with their own lags."""
        for number in itertools.count(1):
            due = self.started + number * TICK_S
            await asyncio.sleep(due - time.perf_counter())
            self.measurement.lags_s.append(time.perf_counter() - due)

    async def _send_in_turn(self, turns: Iterator[bytes], deadline: float) -> None:
        while time.perf_counter() < deadline and (body := next(turns, None)) is not None:
            outcome = await self._send(body, time.perf_counter())
            while self._load.honors_retry_after and isinstance(outcome, Rejection):
                wait_s = PAUSE_S if outcome.retry_after_s is None else outcome.retry_after_s
                if time.perf_counter() + wait_s >= deadline:
                    return
                await asyncio.sleep(wait_s)
                outcome = await self._send(body, time.perf_counter())
            if not isinstance(outcome, Success):
                await asyncio.sleep(PAUSE_S)

    async def _send_at(self, body: bytes, due: float) -> None:
        self.measurement.lags_s.append(time.perf_counter() - due)
        await self._send(body, due)

    async def _send(self, body: bytes, due: float) -> Outcome:
        outcome = await self._exchange(body, due)
        self.measurement.outcomes.append(outcome)
        self.measurement.due_s.append(due - self.started)
        return outcome

    async def _exchange(self, body: bytes, due: float) -> Outcome:
        try:
            response = await self._client.post(self._load.path, body)
        except TimeoutError:
            return Failure("timeout")
        except IncompleteResponseError as error:
            return Failure(str(error))
        except OSError as error:
            own = [os.strerror(number) for number in OWN_ERRORS if number == error.errno]
            return Failure(OWN + own[0].lower() if own else "connection failed")
        return classify(response, due, self._load.is_streamed, self._load.has_usage)
