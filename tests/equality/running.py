"""Requests through the service's engine, in this process and without HTTP."""

from collections.abc import Sequence
from random import Random

from service.engine.engine import Engine
from service.engine.request import Event, Generated, GenerateRequest
from service.runtime.protocol import Runner

FAR = 1e9  # a deadline, and a time to wait in the queue, that no test comes near


def make_request(source: Sequence[int], **fields: object) -> GenerateRequest:
    return GenerateRequest("equality", tuple(source), FAR, **fields)  # type: ignore[arg-type]


def run_events(runner: Runner, requests: Sequence[GenerateRequest], shuffle: Random | None = None) -> list[list[Event]]:
    """Run requests in one engine, together or at random times; return all events."""
    engine = Engine(runner)
    events: list[list[Event]] = [[] for _ in requests]
    waiting = list(range(len(requests)))
    if shuffle is not None:
        shuffle.shuffle(waiting)
    while waiting or engine.has_work:
        for _ in range(len(waiting) if shuffle is None else shuffle.randint(0, 4)):
            if waiting:
                index = waiting.pop(0)
                engine.submit(requests[index], events[index].append)
        engine.step()
    return events


def final(events: Sequence[Event]) -> Generated:
    """Return the result at the end of a request's events."""
    assert isinstance(events[-1], Generated), events[-1]
    return events[-1]


def run(runner: Runner, requests: Sequence[GenerateRequest], shuffle: Random | None = None) -> list[Generated]:
    """Run requests as `run_events` does and return their results."""
    return [final(events) for events in run_events(runner, requests, shuffle)]
