"""Beam search in shared rows equals `tests.support.reference_decoding`, on the fake model."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.base.bundle import Manifest
from sightline.service.engine.beam import BeamGeneration
from sightline.service.engine.generation import ActiveRequest, BeamCopies
from sightline.service.engine.request import (
    Cancelled,
    Failed,
    Generated,
    GenerateRequest,
    MapBudget,
    StopCondition,
    Target,
)
from sightline.service.parameters import GenerateParameters
from tests.service.engine.conftest import (
    FAR,
    SOURCES,
    CheckedRunner,
    Harness,
    StopAtSum,
    ids_of,
    run_alone,
    scores_of,
    slow_logits,
)
from tests.support.fake_runner import FakeRunner, Faults, fake_manifest

END = 2
MAX_TARGET_TOKENS = 12

Reference = Callable[[Manifest, GenerateRequest], Sequence[Any]]


@pytest.fixture(scope="module")
def searched() -> Reference:
    """Return the hypotheses of the reference for a request, best first."""
    from tests.support import reference_decoding as reference

    def search(manifest: Manifest, request: GenerateRequest) -> Sequence[Any]:
        asked, prefix, stop = request.parameters, request.target_prefix, request.stop
        max_new_tokens = min(asked.num_new_tokens, manifest.limits.max_target_tokens - len(prefix))

        def stops(generated: Sequence[int]) -> bool:
            return isinstance(stop, StopAtSum) and sum(generated) >= stop.enough

        step = slow_logits(manifest, request.source_ids)
        options: dict[str, Any] = {"prefix": prefix, "processors": reference.processors_of(asked), "stop": stops}
        if asked.num_beams == 1:
            return [reference.greedy(step, 1, END, max_new_tokens, **options)]
        penalty, early = asked.length_penalty, asked.early_stopping
        count = asked.num_return_sequences
        options["num_forced"] = num_counted(request)
        return reference.beam(step, 1, END, max_new_tokens, asked.num_beams, penalty, early, count, **options)

    return search


def num_counted(request: GenerateRequest) -> int:
    """Return the number of prefix tokens that count in the length: none if the caller adds some."""
    return request.num_forced if request.num_forced == len(request.target_prefix) else 0


def check_targets(targets: Sequence[Target], request: GenerateRequest, expected: Sequence[Any]) -> None:
    prefix, parameters = request.target_prefix, request.parameters
    penalty = parameters.length_penalty if parameters.num_beams > 1 else 0.0
    assert [tuple(ids_of(target)) for target in targets] == [(*prefix, *one.ids) for one in expected]
    for target, one in zip(targets, expected, strict=True):
        logprobs = [token.logprob for token in target.tokens[len(prefix) :]]
        assert logprobs == pytest.approx(one.log_probs, abs=1e-5)
        length = num_counted(request) + len(one.ids)
        assert target.score == pytest.approx(one.score / length**penalty, abs=1e-4)
        last, stop = target.tokens[-1].id, request.stop
        if last == END:
            assert target.finish_reason == "eos"
        else:
            is_stopped = isinstance(stop, StopAtSum) and sum(one.ids) >= stop.enough
            assert target.finish_reason == ("stop" if is_stopped else "length")


def run(manifest: Manifest, max_rows: int, requests: Sequence[GenerateRequest]) -> list[tuple[Target, ...]]:
    harness = Harness(runner=CheckedRunner(max_rows, manifest))
    handles = [harness.submit(request) for request in requests]
    harness.run()
    return [harness.generated(active).targets for active in handles]


@st.composite
def requests_of(draw: st.DrawFn, vocabulary: int, num_beams: st.SearchStrategy[int]) -> GenerateRequest:
    tokens = st.integers(0, vocabulary - 1)
    beams = draw(num_beams)
    parameters = GenerateParameters(
        max_new_tokens=draw(st.sampled_from([1, 2, 3, 5, 8, 100])),
        min_new_tokens=draw(st.sampled_from([0, 0, 0, 1, 3, 9])),
        num_beams=beams,
        num_return_sequences=draw(st.integers(1, beams)),
        length_penalty=draw(st.sampled_from([-1.5, 0.0, 0.6, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.0, 1.4, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 0.6, -1.0])),
        no_repeat_ngram_size=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        logit_bias=draw(st.sampled_from([None, None, None, ((3, 2.5), (END, -1.5))])),
        suppress_tokens=draw(st.sampled_from([(), (), (), (3,), (0, END)])),
        top_logprobs=draw(st.sampled_from([0, 3])),
    )
    prefix = tuple(draw(st.lists(tokens, max_size=3)))
    return GenerateRequest(
        "r",
        tuple(draw(st.lists(st.integers(3, 47), min_size=1, max_size=6))),
        FAR,
        parameters,
        target_prefix=prefix,
        num_forced=draw(st.integers(0, len(prefix))),
        stop=draw(st.sampled_from([None, None, StopAtSum(vocabulary), StopAtSum(4 * vocabulary)])),
    )


@given(data=st.data(), vocabulary=st.sampled_from([5, 6, 9, 16, 17, 18, 40]), max_rows=st.sampled_from([8, 9, 17]))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_beam_searches_in_one_batch_equal_the_reference(
    searched: Reference, data: st.DataObject, vocabulary: int, max_rows: int
) -> None:
    """Several beam searches and greedy generations share one batch."""
    manifest = fake_manifest(vocabulary=vocabulary, max_target_tokens=MAX_TARGET_TOKENS)
    beams, single = requests_of(vocabulary, st.integers(2, 8)), requests_of(vocabulary, st.just(1))
    requests = data.draw(st.lists(st.one_of(beams, beams, single), min_size=1, max_size=5))
    copies = [dataclasses.replace(request, stop=request.stop and request.stop.copy()) for request in requests]
    for request, targets in zip(requests, run(manifest, max_rows, copies), strict=True):
        check_targets(targets, request, searched(manifest, request))


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=30)
def test_a_budget_of_maps_counts_exactly_the_maps_of_the_response(data: st.DataObject) -> None:
    """Regression: a search that continued was charged for map rows that it did not return."""
    manifest = fake_manifest(vocabulary=40, max_target_tokens=MAX_TARGET_TOKENS)
    drawn = requests_of(40, st.integers(1, 8)).filter(lambda request: END not in request.parameters.suppress_tokens)
    kinds = {"cross": 1, "decoder": 1}
    request = dataclasses.replace(data.draw(drawn), attention=frozenset(kinds))
    (targets,) = run(manifest, 8, [dataclasses.replace(request, stop=request.stop and request.stop.copy())])
    lengths = [len(target.tokens) for target in targets]
    # A "cross" row has one column per source token, a "decoder" row one per decoder input.
    numbers = sum(length * len(request.source_ids) + length * (length + 1) // 2 for length in lengths)
    budget = MapBudget(numbers, kinds, kinds, lambda num_bytes: True)
    (again,) = run(manifest, 8, [dataclasses.replace(request, map_budget=budget)])
    assert list(map(ids_of, again)) == list(map(ids_of, targets))
    assert budget.remaining == 0


@pytest.mark.parametrize("max_rows", [8, 9, 17])
def test_beams_and_samples_in_a_batch_equal_those_alone(max_rows: int) -> None:
    manifest = fake_manifest()
    asked = [
        GenerateParameters(num_beams=8, num_return_sequences=8),
        GenerateParameters(do_sample=True, temperature=3.0, seed=4, repetition_penalty=1.5),
        GenerateParameters(num_beams=3, num_return_sequences=2, no_repeat_ngram_size=1, top_logprobs=5),
        GenerateParameters(),
        GenerateParameters(num_beams=5, length_penalty=-1.0, early_stopping="never", min_new_tokens=6),
        GenerateParameters(do_sample=True, top_p=0.9, top_k=7, seed=5),
    ]
    requests = [
        GenerateRequest("r", source, FAR, parameters, target_prefix=(9, 8, 7)[:index])
        for index, source in enumerate(SOURCES[:3])
        for parameters in asked
    ]
    for request, targets in zip(requests, run(manifest, max_rows, requests), strict=True):
        assert targets == run_alone(request, manifest).targets


def beams_of(num_beams: int, rows: list[int], stop: StopCondition | None = None, **parameters: Any) -> BeamGeneration:
    asked = GenerateParameters(num_beams=num_beams, num_return_sequences=num_beams, **parameters)
    request = GenerateRequest("r", (5,), FAR, asked, stop=stop)
    generation = BeamGeneration(
        ActiveRequest(0, request, lambda _: None, 0.0), request, fake_manifest(vocabulary=6), {}
    )
    generation.rows = rows
    return generation


def test_a_beam_stays_in_the_row_of_its_parent_and_only_others_move() -> None:
    generation = beams_of(3, rows=[4, 0, 2])
    first, beam_copies = scores_of([[0.0] * 6] * 4 + [[0.0, 0, 0, 3, 2, 1]]), BeamCopies()
    assert generation.advance(first, beam_copies) == ()
    assert beam_copies == [(4, 0, slice(0, 1)), (4, 2, slice(0, 1))]
    assert first.next_ids[[4, 0, 2]].tolist() == [3, 4, 5]
    # The beam in row 0 has two children among the best, that in row 4 one, that in row 2 none.
    likely, unlikely = [-9.0, -9, -9, 9, 8.9, -9], [-9.0, -9, -9, 5, 5, 5]
    second = scores_of([likely, [0.0] * 6, unlikely, [0.0] * 6, [-9, -9, -9, -9, -9, 9]])
    beam_copies.clear()
    assert generation.advance(second, beam_copies) == ()
    assert beam_copies == [(0, 2, slice(1, 2))]
    assert second.next_ids[[4, 0, 2]].tolist() == [5, 3, 4]
    assert [hypothesis.ids for hypothesis in generation.hypotheses()] == [[3, 5], [4, 3], [4, 4]]


# The first row has probability 0.75 for token 3 and 0.2 for the end; the second row is flat.
LIKELY_THREE = [[math.log(p) for p in (0.01, 0.01, 0.2, 0.75, 0.02, 0.01)], [0.0, 0.0, -9.0, 0.0, 0.0, 0.0]]


def test_a_forbidden_end_token_is_not_a_candidate() -> None:
    """The search considers twice as many candidates as beams: two of them stop, two continue."""
    asked: dict[str, Any] = {"min_new_tokens": 1, "early_stopping": "never", "length_penalty": 5.0}
    generation = beams_of(2, rows=[0, 1], stop=StopAtSum(4), **asked)
    assert generation.advance(scores_of([[1.0, 0.0, 9.0, 2.0, 3.0, 4.0], [0.0] * 6]), []) == ()
    assert [hypothesis.ids for hypothesis in generation.hypotheses()] == [[3], [0]]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_a_probable_beam_continues_the_search(length_penalty: float, early_stopping: Any) -> None:
    """Without a length reward, "never" uses the current length, as Transformers does."""
    generation = beams_of(2, rows=[0, 1], length_penalty=length_penalty, early_stopping=early_stopping)
    step = scores_of(LIKELY_THREE)
    assert generation.advance(step, []) == ()
    assert generation.advance(step, []) == ()
    assert generation.hypotheses()[0].ids == [3, 3]


def test_early_stopping_ends_the_same_search() -> None:
    generation = beams_of(2, rows=[0, 1], early_stopping=True)
    step = scores_of(LIKELY_THREE)
    assert generation.advance(step, []) == ()
    assert [ids_of(target) for target in generation.advance(step, [])] == [[3, END], [END]]


def test_fewer_targets_are_returned_if_vocabulary_and_length_allow_no_more() -> None:
    manifest = fake_manifest(vocabulary=5)
    asked = GenerateParameters(num_beams=8, num_return_sequences=8, max_new_tokens=1)
    few = asked.model_copy(update={"suppress_tokens": (0, 4)})
    requests = [GenerateRequest("r", (5, 6), FAR, parameters) for parameters in (asked, few)]
    all_tokens, allowed = run(manifest, 17, requests)
    assert sorted(ids_of(target)[0] for target in all_tokens) == [0, 1, 2, 3, 4]
    assert sorted(ids_of(target)[0] for target in allowed) == [1, 2, 3]


def test_a_stop_string_ends_one_hypothesis_and_the_search_continues() -> None:
    harness, stop = Harness(), StopAtSum(60)
    parameters = GenerateParameters(num_beams=4, num_return_sequences=4)
    handles = [harness.generate(source, parameters=parameters, stop=stop) for source in SOURCES]
    harness.run()
    reasons = [{target.finish_reason for target in harness.generated(active).targets} for active in handles]
    assert {"stop", "eos"} in reasons
    for active in handles:
        for target in harness.generated(active).targets:
            sums = np.cumsum(ids_of(target))
            assert (sums[:-1] < 60).all()
            assert (target.finish_reason == "stop") == (sums[-1] >= 60 and target.tokens[-1].id != END)
    assert stop == StopAtSum(60), "each hypothesis has a condition of its own"


def test_targets_are_distinct_and_sorted_by_score() -> None:
    harness = Harness(max_rows=8)
    handles = [harness.search(source, num_beams=8, length_penalty=0.7) for source in SOURCES]
    harness.run()
    for active in handles:
        targets = harness.generated(active).targets
        scores = [target.score for target in targets]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(ids_of(target)) for target in targets}) == 8


@pytest.mark.parametrize("reads_all", [False, True])
def test_each_token_of_a_beam_has_the_alternatives_at_its_position(reads_all: bool) -> None:
    """Processors change the choice of tokens, but not the returned log-probabilities."""
    harness = Harness()
    penalty = 1.3 if reads_all else 1.0
    active = harness.search(SOURCES[4], num_beams=3, top_logprobs=4, repetition_penalty=penalty)
    harness.run()
    slow = slow_logits(harness.runner.manifest, SOURCES[4])
    for target in harness.generated(active).targets:
        ids = ids_of(target)
        for position, token in enumerate(target.tokens):
            (logits,) = slow([[1, *ids[:position]]])
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logprobs)[:4]
            assert [id_ for id_, _ in token.alternatives] == best.tolist()
            assert [logprob for _, logprob in token.alternatives] == pytest.approx(logprobs[best], abs=1e-5)
            assert token.logprob == pytest.approx(logprobs[token.id], abs=1e-5)


class OneRowIsNan(FakeRunner):
    """Returns NaN for some rows of one step."""

    def __init__(self, step: int, rows: list[int]) -> None:
        super().__init__(fake_manifest(vocabulary=6), max_rows=8)
        self._nan_step, self._nan_rows = step, rows

    def step(self, *arguments: Any, **options: Any) -> Any:
        outputs = super().step(*arguments, **options)
        if self.num_steps == self._nan_step:
            for name in {"logits", "logprobs", "top_logprobs"} & set(outputs):
                outputs[name][self._nan_rows] = math.nan
        return outputs


def run_with_nan(step: int, rows: list[int]) -> tuple[Harness, list[ActiveRequest]]:
    """Beams in rows 0 to 2, a greedy generation in row 3, beams in rows 4 to 7.

    The first step reads a prefix, in all rows.
    """
    harness = Harness(runner=OneRowIsNan(step, rows))
    # Equal lengths, so that the order in the encoder's batch is kept.
    sources = [(5, 6, 7, 8), (8, 9, 10, 11), (12, 13, 14, 15)]
    asked = [GenerateParameters(num_beams=beams, num_return_sequences=beams) for beams in (3, 1, 4)]
    handles = [
        harness.generate(source, parameters=parameters, target_prefix=(3,))
        for source, parameters in zip(sources, asked, strict=True)
    ]
    harness.run()
    return harness, handles


def test_a_beam_with_scores_that_are_not_finite_ends_only_its_search() -> None:
    sound, handles = run_with_nan(0, [])
    expected = [sound.final(active) for active in handles]
    assert all(isinstance(final, Generated) for final in expected)
    for row, failing in ((1, 0), (3, 1), (7, 2)):
        harness, handles = run_with_nan(3, [row])
        finals = [harness.final(active) for active in handles]
        assert finals == [Failed("internal") if index == failing else one for index, one in enumerate(expected)]


def test_scores_of_rows_without_a_beam_are_ignored() -> None:
    """Before the first token, only the first row is used."""
    sound, expected = run_with_nan(0, [])
    harness, handles = run_with_nan(2, [1, 2, 5, 6, 7])
    assert [harness.final(active) for active in handles] == [sound.final(active) for active in expected]


def test_a_source_that_is_not_finite_fails_its_search_alone() -> None:
    harness = Harness(max_rows=8, faults=Faults(nan_id=40))
    bad, good = harness.search((40, 5), num_beams=3), harness.search((5, 6), num_beams=3)
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert len(harness.generated(good).targets) == 3


def test_cancellation_and_deadlines_free_all_rows_of_a_search() -> None:
    harness = Harness(max_rows=6)
    cancelled, late = harness.search(SOURCES[5], num_beams=3), harness.search(SOURCES[6], num_beams=3, deadline=2.0)
    next_, last = harness.search(SOURCES[7], num_beams=3), harness.search(SOURCES[8], num_beams=3)
    harness.engine.step()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (2, 2)
    harness.engine.cancel(cancelled)
    harness.engine.step()
    assert harness.final(cancelled) == Cancelled()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (2, 1)
    harness.now = 2.0
    harness.engine.step()
    assert harness.final(late) == Failed("deadline_exceeded")
    assert (harness.engine.num_running, harness.engine.num_waiting) == (2, 0)
    harness.run()
    for active in (next_, last):
        assert isinstance(active.request, GenerateRequest)
        assert harness.generated(active).targets == run_alone(active.request, harness.runner.manifest).targets
