"""The result of a request does not depend on other requests in the batch or on streaming."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from sightline.service.engine.request import Generated, GenerateRequest, TokenEvent
from sightline.service.parameters import FORCED, GenerateParameters
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.running import (
    assert_same_maps,
    assert_same_targets,
    final,
    make_request,
    run,
    run_events,
    without_maps,
)

KINDS = frozenset({"encoder", "cross", "decoder"})
PREFIX = (268, 301)  # two tokens like any other
SHAPED: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 12}

# Parameters of the requests in the mixed batch.
MIX: tuple[dict[str, Any], ...] = (
    {},
    {"attention": KINDS},
    {"parameters": GenerateParameters(num_beams=4, num_return_sequences=3)},
    {"parameters": GenerateParameters(num_beams=8, length_penalty=0.6, early_stopping=True), "attention": KINDS},
    {"parameters": GenerateParameters(num_beams=3, early_stopping="never", max_new_tokens=20, **SHAPED)},
    {"parameters": GenerateParameters(do_sample=True, seed=1, temperature=1.3)},
    {"parameters": GenerateParameters(do_sample=True, seed=2, top_k=20, top_p=0.9), "attention": frozenset({"cross"})},
    {"parameters": GenerateParameters(do_sample=True, seed=3, **SHAPED), "stream": True},
    {"parameters": GenerateParameters(**SHAPED), "attention": frozenset({"decoder"})},
    {"parameters": GenerateParameters(top_logprobs=5), "stream": True, "target_prefix": PREFIX},
    {"parameters": GenerateParameters(num_beams=2, suppress_tokens=(4, 268)), "target_prefix": PREFIX},
    {"parameters": FORCED, "target_prefix": (*PREFIX, 2), "attention": KINDS},
)


def mixed_requests(sources: Sequence[tuple[int, ...]]) -> list[GenerateRequest]:
    return [make_request(source, **MIX[number % len(MIX)]) for number, source in enumerate(sources[: 3 * len(MIX)])]


def assert_same_results(expected: Sequence[Generated], given: Sequence[Generated]) -> None:
    for one, other in zip(expected, given, strict=True):
        assert_same_targets(one.targets, other.targets)


@pytest.fixture(scope="module")
def requests(sources: list[tuple[int, ...]]) -> list[GenerateRequest]:
    return mixed_requests(sources)


@pytest.fixture(scope="module")
def alone(runner: OnnxRunner, requests: list[GenerateRequest]) -> list[Generated]:
    """Run each request alone in the engine."""
    return [result for request in requests for result in run(runner, [request])]


@pytest.mark.parametrize("seed", range(3))
def test_batched_equals_alone(
    seed: int, runner: OnnxRunner, requests: list[GenerateRequest], alone: list[Generated]
) -> None:
    """Requests with all parameters join one running batch in random order."""
    assert_same_results(alone, run(runner, requests, shuffle=Random(seed)))


def test_every_kind_of_request_in_the_mix_has_its_result(
    requests: list[GenerateRequest], alone: list[Generated]
) -> None:
    for request, result in zip(requests, alone, strict=True):
        assert len(result.targets) == request.parameters.num_return_sequences
        for target in result.targets:
            assert tuple(token.id for token in target.tokens[: len(request.target_prefix)]) == request.target_prefix
            assert target.attention.keys() == request.attention
            assert all(len(token.alternatives) == request.parameters.top_logprobs for token in target.tokens)


def test_streamed_equals_complete_output(
    runner: OnnxRunner, requests: list[GenerateRequest], alone: list[Generated]
) -> None:
    """The events contain the generated tokens, and the result equals that without streaming."""
    single = [index for index, request in enumerate(requests) if request.parameters.num_beams == 1]
    streamed = [replace(requests[index], stream=True) for index in single]
    events = run_events(runner, streamed, shuffle=Random(7))
    assert_same_results([alone[index] for index in single], [final(each) for each in events])
    for request, each in zip(streamed, events, strict=True):
        tokens = tuple(event.token for event in each[:-1] if isinstance(event, TokenEvent))
        assert len(tokens) == len(each) - 1
        assert tokens == final(each).targets[0].tokens[len(request.target_prefix) :]


def test_with_maps_equals_without(runner: OnnxRunner, requests: list[GenerateRequest], alone: list[Generated]) -> None:
    without = [replace(result, targets=tuple(map(without_maps, result.targets))) for result in alone]
    with_maps = run(runner, [replace(request, attention=KINDS) for request in requests])
    assert all(target.attention.keys() == KINDS for result in with_maps for target in result.targets)
    given = [replace(result, targets=tuple(map(without_maps, result.targets))) for result in with_maps]
    assert_same_results(without, given)


@pytest.mark.parametrize("prefix", [(), PREFIX])
def test_a_generated_targets_maps_are_those_of_forcing_it(
    prefix: tuple[int, ...], runner: OnnxRunner, sources: list[tuple[int, ...]]
) -> None:
    """Attention weights stay with their beam when the search reorders beams."""
    searches = (
        GenerateParameters(num_beams=5, num_return_sequences=5),
        GenerateParameters(num_beams=4, num_return_sequences=4, length_penalty=0.6, early_stopping=True, **SHAPED),
        GenerateParameters(do_sample=True, seed=4),
    )
    requests = [
        make_request(source, parameters=parameters, attention=KINDS, target_prefix=prefix)
        for source in sources[:6]
        for parameters in searches
    ]
    found = [(request, target) for request in requests for target in run(runner, [request])[0].targets]
    forced = [
        replace(request, parameters=FORCED, target_prefix=tuple(token.id for token in target.tokens))
        for request, target in found
    ]
    for (_, target), result in zip(found, run(runner, forced), strict=True):
        (expected,) = result.targets
        assert expected.finish_reason == "forced"
        assert [token.id for token in expected.tokens] == [token.id for token in target.tokens]
        assert_same_maps(expected, target)
