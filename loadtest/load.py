"""Closed-loop and open-loop load.

In a closed loop, each of a number of clients sends its next request after the response to the last
one, so that the service determines the rate. In an open loop, requests are due at random times with
a given mean rate (a Poisson process), independent of the service. Latency is measured from the time
when a request was due, so that it includes the delay of a late start.
"""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.client import Client, IncompleteResponseError
from loadtest.outcome import Failure, Outcome, Rejection, Success, classify

PAUSE_S = 0.05  # pause of a client after a rejection or failure, so that it does not flood a failing service
ARRIVALS_SEED = 20


@dataclass(frozen=True)
class Load:
    """Requests to send; the load ends after `duration_s` or `requests`, whichever comes first.

    Args:
        path: path of the endpoint.
        bodies: bodies of the requests, sent cyclically in this order.
        is_streamed: the responses are event streams.
        clients: number of clients of a closed loop.
        rate: requests per second of an open loop; None means a closed loop.
        duration_s: time in seconds after which no request is sent; pending responses are awaited.
        requests: number of requests to send, without repetitions.
        honors_retry_after: after a rejection, a client of a closed loop waits for `Retry-After` and
            repeats the request.
    """

    path: str
    bodies: Sequence[bytes]
    is_streamed: bool = False
    clients: int = 1
    rate: float | None = None
    duration_s: float = math.inf
    requests: int | None = None
    honors_retry_after: bool = False


@dataclass(frozen=True)
class Measurement:
    """Outcome of each request, and the time from the first request to the last response."""

    outcomes: Sequence[Outcome]
    elapsed_s: float


async def run_load(client: Client, load: Load) -> Measurement:
    """Send the requests of a load and wait for all responses."""
    started = time.perf_counter()
    deadline = started + load.duration_s
    outcomes: list[Outcome] = []
    turns = _turns(load, deadline)
    async with asyncio.TaskGroup() as group:
        if load.rate is None:
            for _ in range(load.clients):
                group.create_task(_send_in_turn(client, load, turns, deadline, outcomes))
        else:
            arrivals = random.Random(ARRIVALS_SEED)  # noqa: S311 - a schedule, not a secret
            due = started
            for body in turns:
                due += arrivals.expovariate(load.rate)
                if due >= deadline:
                    break
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(_send_at(client, load, body, due, outcomes))
    return Measurement(outcomes, time.perf_counter() - started)


def _turns(load: Load, deadline: float) -> Iterator[bytes]:
    for number, body in enumerate(itertools.cycle(load.bodies)):
        if number == load.requests or time.perf_counter() >= deadline:
            return
        yield body


async def _send_in_turn(
    client: Client, load: Load, turns: Iterator[bytes], deadline: float, outcomes: list[Outcome]
) -> None:
    for body in turns:
        outcome = await _send(client, load, body, time.perf_counter())
        outcomes.append(outcome)
        while load.honors_retry_after and isinstance(outcome, Rejection):
            wait_s = PAUSE_S if outcome.retry_after_s is None else outcome.retry_after_s
            if time.perf_counter() + wait_s >= deadline:
                return
            await asyncio.sleep(wait_s)
            outcome = await _send(client, load, body, time.perf_counter())
            outcomes.append(outcome)
        if not isinstance(outcome, Success):
            await asyncio.sleep(PAUSE_S)


async def _send_at(client: Client, load: Load, body: bytes, due: float, outcomes: list[Outcome]) -> None:
    outcomes.append(await _send(client, load, body, due))


async def _send(client: Client, load: Load, body: bytes, due: float) -> Outcome:
    try:
        response = await client.post(load.path, body)
    except TimeoutError:
        return Failure("timeout")
    except IncompleteResponseError as error:
        return Failure(str(error))
    except OSError:
        return Failure("connection failed")
    return classify(response, due, load.is_streamed)
