"""Sends requests in a closed or an open loop and collects what became of them.

Closed loop: so many clients, each sends its next request when the answer to the last one is there; the service sets the
pace. Open loop: requests are due at random times at a given mean rate (a Poisson process), whatever the service does;
latency counts from when a request was due, so a late start is not forgiven.
"""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.client import BrokenAnswerError, Client
from loadtest.outcome import Failure, Outcome, Refusal, Success, judge

PAUSE_S = 0.05  # of a client after a refusal or a failure, lest it hammer a service that is down
ARRIVALS_SEED = 20


@dataclass(frozen=True)
class Load:
    """What to send. It ends after `duration_s` or `requests`, whichever comes first.

    Args:
        path: of the endpoint.
        bodies: of the requests, sent in this order and again from the start.
        is_streamed: whether the answers are streams of events.
        clients: of a closed loop.
        rate: requests a second of an open loop; None means a closed one.
        duration_s: no request is sent after that; those under way are waited for.
        requests: how many to send, not counting repetitions.
        honors_retry_after: whether a client of a closed loop waits `Retry-After` on a refusal and sends the same
            request again.
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
    """What became of each request, and the time from the first one's start to the last one's end."""

    outcomes: Sequence[Outcome]
    elapsed_s: float


async def run_load(client: Client, load: Load) -> Measurement:
    """Send `load` and wait for all answers."""
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
        while load.honors_retry_after and isinstance(outcome, Refusal):
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
        answer = await client.post(load.path, body)
    except TimeoutError:
        return Failure("no whole answer in time")
    except BrokenAnswerError as error:
        return Failure(str(error))
    except OSError:
        return Failure("no connection")
    return judge(answer, due, load.is_streamed)
