"""Generations with one row: greedy decoding, sampling, prefixes and scored targets."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sightline.service.engine.generation import ActiveRequest, NonFiniteError
from sightline.service.engine.request import GenerateRequest, TokenEvent
from sightline.service.engine.scores import StepScores
from sightline.service.engine.single import SingleGeneration
from sightline.service.parameters import FORCED, GenerateParameters
from tests.service.engine.conftest import FAR, SOURCES, Harness, StopAfter, ids_of, run_alone, scores_of, slow_logits
from tests.support.fake_runner import fake_manifest

END = 2


def single(row: int, prefix: tuple[int, ...] = (), **parameters: Any) -> SingleGeneration:
    request = GenerateRequest("r", (5,), FAR, GenerateParameters(**parameters), target_prefix=prefix)
    generation = SingleGeneration(
        ActiveRequest(0, request, lambda _: None, 0.0), request, fake_manifest(vocabulary=6), {}
    )
    generation.rows = [row]
    return generation


def advance(generations: list[SingleGeneration], scores: StepScores) -> list[float]:
    """Return the log-probabilities of the tokens that one step appends to each generation."""
    for generation in generations:
        assert generation.advance(scores, []) == ()
    return [generation.hypotheses()[0].logprobs[-1] for generation in generations]


def test_greedy_sampled_and_forced_rows_share_a_step() -> None:
    likely_end = [0.0, 1.0, 5.0, 2.0, 0.0, 0.0]
    logits = [likely_end, likely_end, [0.0, 9.0, 0.0, 0.0, 0.0, 0.0], likely_end, likely_end, likely_end]
    generations = [
        single(1, min_new_tokens=1),
        single(2, do_sample=True, top_k=1, temperature=0.1),
        single(3, prefix=(0, 1)),
        single(4, suppress_tokens=(END, 3)),
        single(5, repetition_penalty=9.0, no_repeat_ngram_size=1, min_new_tokens=1),  # the start token was read
    ]
    scores = scores_of(logits)
    logprobs = advance(generations, scores)
    assert scores.next_ids.tolist() == [END, 3, 1, 0, 1, 3]  # a row without a generation keeps its best token
    for row, logprob in enumerate(logprobs, 1):  # before temperature, penalties and filters
        normalizer = math.log(sum(math.exp(logit) for logit in logits[row]))
        assert logprob == pytest.approx(logits[row][scores.next_ids[row]] - normalizer, abs=1e-6)


@pytest.mark.parametrize("whole", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("prefix", [(), (3, 4)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_row_that_is_not_finite_is_reported(whole: float, prefix: tuple[int, ...], do_sample: bool) -> None:
    with np.errstate(all="ignore"):
        scores = scores_of([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [whole] * 6])
    assert advance([single(0, prefix, do_sample=do_sample)], scores)
    with pytest.raises(NonFiniteError):
        single(1, prefix, do_sample=do_sample).advance(scores, [])


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_token_is_taken_only_if_its_score_is_finite(logprob: float) -> None:
    generation = single(0)
    assert not generation.take_best(3, logprob)
    assert generation.hypotheses()[0].ids == []
    assert generation.take_best(3, -0.5)


def test_a_step_does_not_change_the_scores() -> None:
    """The scores are arrays of the runner and must not be changed."""
    scores = scores_of([[0.0, 1.0, 5.0, 2.0, 0.0, 0.0]])
    before = scores.logits(0).copy(), scores.logprobs(0).copy()
    advance([single(0, suppress_tokens=(END,), do_sample=True, repetition_penalty=2.0)], scores)
    np.testing.assert_array_equal(scores.logits(0), before[0])
    np.testing.assert_array_equal(scores.logprobs(0), before[1])


def test_a_scored_target_has_the_log_probabilities_of_the_same_generated_text() -> None:
    harness = Harness()
    free = harness.generate(SOURCES[3], parameters=GenerateParameters(top_logprobs=3))
    harness.run()
    scoring = FORCED.model_copy(update={"top_logprobs": 3})
    forced = harness.generate(SOURCES[3], target_prefix=tuple(harness.ids(free)), parameters=scoring)
    other = harness.generate(SOURCES[3], target_prefix=(END, 7), parameters=scoring)
    harness.run()
    assert harness.target(forced).tokens == harness.target(free).tokens
    assert harness.target(forced).finish_reason == harness.target(other).finish_reason == "forced"
    assert harness.ids(other) == [END, 7]  # not even the end token ends it early
    slow = slow_logits(harness.runner.manifest, SOURCES[3])
    for position, token in enumerate(harness.target(other).tokens):
        (logits,) = slow([[1, END][: position + 1]])
        assert token.logprob == pytest.approx(float(logits[token.id] - np.log(np.exp(logits).sum())), abs=1e-5)


@pytest.mark.parametrize("num_forced", range(6))
def test_a_generation_continues_a_prefix_as_if_it_had_generated_it(num_forced: int) -> None:
    harness = Harness()
    free = harness.generate(SOURCES[3])
    harness.run()
    whole = harness.target(free)
    continued = harness.generate(SOURCES[3], target_prefix=tuple(ids_of(whole)[:num_forced]))
    harness.run()
    target = harness.target(continued)
    assert target.tokens == whole.tokens
    assert target.finish_reason == "eos"
    assert target.score == pytest.approx(sum(token.logprob for token in whole.tokens[num_forced:]))


def test_a_prefix_changes_what_comes_after_it() -> None:
    harness = Harness()
    active = harness.generate(SOURCES[3], target_prefix=(40, 30))
    harness.run()
    ids, slow = harness.ids(active), slow_logits(harness.runner.manifest, SOURCES[3])
    assert ids[:2] == [40, 30]
    assert ids[2:] == [int(slow([[1, *ids[:position]]])[0].argmax()) for position in range(2, len(ids))]


def test_a_prefix_counts_only_towards_the_limit_of_the_model() -> None:
    harness = Harness()
    parameters = GenerateParameters(max_new_tokens=3, min_new_tokens=3)
    few = harness.generate(SOURCES[3], target_prefix=(9,) * 4, parameters=parameters)
    many = harness.generate(SOURCES[3], target_prefix=(9,) * 4, parameters=GenerateParameters(min_new_tokens=100))
    stopped = harness.generate(SOURCES[3], target_prefix=(9,) * 4, stop=StopAfter(2))
    harness.run()
    assert [len(harness.ids(active)) for active in (few, many, stopped)] == [7, 24, 6]
    assert [harness.target(active).finish_reason for active in (few, many, stopped)] == ["length", "length", "stop"]
    assert END not in harness.ids(many)


def test_streamed_tokens_are_those_of_the_result_and_none_of_the_prefix() -> None:
    for prefix in ((), (9, 40, 7)):
        harness = Harness()
        parameters = GenerateParameters(top_logprobs=2)
        active = harness.generate(SOURCES[3], stream=True, target_prefix=prefix, parameters=parameters)
        harness.run()
        streamed = [event.token for event in harness.events[active] if isinstance(event, TokenEvent)]
        assert tuple(streamed) == harness.target(active).tokens[len(prefix) :]
        assert all(len(token.alternatives) == 2 for token in streamed)


def test_a_scored_target_streams_nothing() -> None:
    harness = Harness()
    scoring = FORCED
    active = harness.generate(SOURCES[3], stream=True, target_prefix=(9, 2), parameters=scoring)
    harness.run()
    assert harness.events[active] == [harness.generated(active)]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"min_new_tokens": 24},
        {"do_sample": True, "temperature": 4.0, "seed": 3},
        {"suppress_tokens": tuple(range(3, 40))},
    ],
)
def test_alternatives_have_the_probabilities_of_the_model_before_processors(parameters: dict[str, Any]) -> None:
    manifest = fake_manifest()
    prefix = (9, 40)
    request = GenerateRequest(
        "r", SOURCES[5], FAR, GenerateParameters(top_logprobs=5, **parameters), target_prefix=prefix
    )
    (target,) = run_alone(request, manifest).targets
    ids, slow = ids_of(target), slow_logits(manifest, SOURCES[5])
    assert len(ids) > len(prefix)
    for position, token in enumerate(target.tokens):
        (logits,) = slow([[1, *ids[:position]]])
        logprobs = logits - np.log(np.exp(logits).sum())
        assert [id_ for id_, _ in token.alternatives] == np.argsort(-logprobs)[:5].tolist()
        best = sorted(logprobs, reverse=True)[:5]
        assert [logprob for _, logprob in token.alternatives] == pytest.approx(best, abs=1e-5)
        assert dict(token.alternatives).get(token.id, token.logprob) == token.logprob


def test_alternatives_are_limited_by_the_vocabulary() -> None:
    request = GenerateRequest("r", (5, 6), FAR, GenerateParameters(top_logprobs=5))
    (target,) = run_alone(request, fake_manifest(vocabulary=4)).targets
    for token in target.tokens:
        assert sorted(id_ for id_, _ in token.alternatives) == [0, 1, 2, 3]
        assert sum(math.exp(logprob) for _, logprob in token.alternatives) == pytest.approx(1)


def test_greedy_processors_act_on_logits_and_the_prefix_counts() -> None:
    """Each position equals a reference loop over the logits with the same processors."""
    manifest = fake_manifest(vocabulary=9)
    parameters = GenerateParameters(
        repetition_penalty=1.7, no_repeat_ngram_size=2, suppress_tokens=(0, 4), min_new_tokens=4
    )
    prefix = (5, 3, 5)
    for source in SOURCES:
        request = GenerateRequest("r", source, FAR, parameters, target_prefix=prefix)
        (target,) = run_alone(request, manifest).targets
        ids, slow = ids_of(target), slow_logits(manifest, source)
        for position in range(len(prefix), len(ids)):
            read = [1, *ids[:position]]
            logits = slow([read])[0].astype(np.float64)
            seen = [logits[token] / 1.7 if token in read else logits[token] for token in range(9)]
            for token in range(9):
                repeats = (read[-1], token) in pairwise(read)
                if repeats or token in (0, 4) or (token == END and position < len(prefix) + 4):
                    seen[token] = -math.inf
            assert ids[position] == int(np.argmax(seen))
