"""Requests through the service's engine, in this process and without HTTP."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from sightline.service.engine.engine import Engine
from sightline.service.engine.request import Event, Generated, GenerateRequest, Target
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import Runner

FAR = 1e9  # a deadline, and a time to wait in the queue, that no test comes near
MAX_NEW_TOKENS = 12
GREEDY = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS)
BEAMS = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS, num_beams=4, num_return_sequences=2)


def pairs(names: Iterable[str], settings: Mapping[str, Any], slow: Collection[tuple[str, str]]) -> list[Any]:
    """Return each name with each setting for a test; only the slow tests run those in `slow`."""
    return [
        pytest.param(name, setting, id=f"{name}-{id_}", marks=[pytest.mark.slow] if (name, id_) in slow else [])
        for name in names
        for id_, setting in settings.items()
    ]


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


def without_maps(target: Target) -> Target:
    return replace(target, attention={})


def assert_same_maps(expected: Target, actual: Target) -> None:
    assert actual.attention.keys() == expected.attention.keys()
    for kind, maps in expected.attention.items():
        np.testing.assert_array_equal(actual.attention[kind], maps)


def assert_same_targets(expected: Sequence[Target], actual: Sequence[Target]) -> None:
    """Compare all values of targets bit by bit."""
    for first, second in zip(expected, actual, strict=True):
        assert without_maps(second) == without_maps(first)
        assert_same_maps(first, second)
