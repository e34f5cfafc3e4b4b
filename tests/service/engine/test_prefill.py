"""Prompts of decoder-only models are read in chunks between decoder steps, on the fake model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import PREFILL_TOKENS, Manifest
from sightline.service.engine.checks import MAX_FAILURES, RuntimeFailedError
from sightline.service.engine.prefill import BUDGET_S
from sightline.service.engine.request import Cancelled, Encoded, EncodeRequest, Failed, GenerateRequest
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import Array, Int64
from tests.service.engine.conftest import FAR, CheckedRunner, Harness, ids_of, run_alone
from tests.support.fake_runner import HIDDEN, FakeFaultError, FakeRunner, Faults, fake_manifest

LIMIT = 240
BREAKING = 40  # a prompt token
GREEDY = GenerateParameters()
SAMPLED = GenerateParameters(do_sample=True, seed=3, temperature=2.0)
BEAMS = GenerateParameters(num_beams=3, num_return_sequences=2)
ALWAYS = frozenset(range(1, 1000))


@pytest.fixture
def manifest() -> Manifest:
    return fake_manifest(decoder_start="source", max_source_tokens=LIMIT, max_target_tokens=LIMIT)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(one) for one in np.random.default_rng(seed).integers(3, BREAKING, length))


class Timed(CheckedRunner):
    """Runner whose prefill calls advance the clock of its harness. Records the order of calls."""

    def __init__(self, max_rows: int, manifest: Manifest, seconds: float = BUDGET_S, **options: Any) -> None:
        super().__init__(max_rows, manifest, **options)
        self.harness = Harness(runner=self)
        self.seconds = seconds
        self.calls: list[str] = []

    def prefill(self, row: int, token_ids: Int64, length: int, outputs: Sequence[str] = ()) -> Mapping[str, Array]:
        self.harness.now += self.seconds
        self.calls.append("prefill")
        return super().prefill(row, token_ids, length, outputs)

    def step(self, *arguments: Any, **options: Any) -> Mapping[str, Array]:
        self.calls.append("step")
        return super().step(*arguments, **options)


def request(source: Sequence[int], call: str = "p", **fields: Any) -> GenerateRequest:
    return GenerateRequest(call, tuple(source), FAR, **fields)


def ids(harness: Harness, active: Any) -> list[list[int]]:
    return [ids_of(target) for target in harness.generated(active).targets]


def alone(one: GenerateRequest, manifest: Manifest) -> list[list[int]]:
    return [ids_of(target) for target in run_alone(one, manifest).targets]


@pytest.mark.parametrize("length", [1, 2, PREFILL_TOKENS, PREFILL_TOKENS + 1, PREFILL_TOKENS + 2, 3 * PREFILL_TOKENS])
@pytest.mark.parametrize("parameters", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_a_prompt_of_any_length_is_read_once(length: int, parameters: GenerateParameters, manifest: Manifest) -> None:
    """`CheckedRunner` checks that no chunk of a longer prompt has a single token."""
    runner = CheckedRunner(4, manifest)
    harness, source = Harness(runner=runner), prompt(length)
    active = harness.submit(request(source, parameters=parameters.model_copy(update={"max_new_tokens": 5})))
    harness.run()
    assert runner.prefilled == list(source)
    if parameters is GREEDY:
        assert ids(harness, active) == [FakeRunner(manifest, 1).expected(source, 5)]
    else:
        assert ids(harness, active) == alone(
            request(source, parameters=BEAMS.model_copy(update={"max_new_tokens": 5})), manifest
        )


def test_running_rows_are_stepped_between_chunks(manifest: Manifest) -> None:
    """A chunk is started only if it fits the budget, or if it is the first."""
    runner = Timed(4, manifest, seconds=0.4 * BUDGET_S)
    harness = runner.harness
    running = harness.submit(request(prompt(3), parameters=GenerateParameters(min_new_tokens=20)))
    harness.engine.step()
    long = harness.submit(request(prompt(LIMIT - 20, seed=1)))
    runner.calls.clear()
    harness.run()
    runs = [len(list(calls)) for kind, calls in groupby(runner.calls) if kind == "prefill"]
    assert runs == [2, 2, 2, 1]  # 219 tokens are 7 chunks
    assert ids(harness, running) == alone(running.request, manifest)  # type: ignore[arg-type]
    assert ids(harness, long) == alone(long.request, manifest)  # type: ignore[arg-type]


def test_the_end_of_a_prompt_returns_the_first_token_before_the_next_step(manifest: Manifest) -> None:
    runner, events = Timed(4, manifest), list[Any]()
    harness, source = runner.harness, prompt(40)
    harness.submit(request(source, stream=True), events.append)
    harness.engine.step()
    assert runner.calls == ["prefill"]
    assert [event.token.id for event in events] == FakeRunner(manifest, 1).expected(source, 1)
    harness.engine.step()
    assert runner.calls == ["prefill", "step"]


def test_the_speed_is_unknown_while_all_rows_are_in_prefill(manifest: Manifest) -> None:
    """Regression: it was 0, and admission divided by it."""
    harness = Timed(2, manifest, seconds=0.1).harness
    for seed in range(3):  # the last one waits for a row
        harness.submit(request(prompt(200, seed), str(seed)))
    for _ in range(5):
        harness.engine.step()
    assert harness.engine.num_waiting == 1
    assert harness.engine.throughput.units_per_s is None
    harness.run()
    assert harness.engine.throughput.units_per_s


def test_rows_in_prefill_are_not_stepped(manifest: Manifest) -> None:
    runner = Timed(8, manifest)
    harness = runner.harness
    harness.submit(request(prompt(2), parameters=GenerateParameters(min_new_tokens=20)))
    harness.engine.step()
    search = harness.submit(request(prompt(100, seed=1), parameters=BEAMS))
    runner.stepped.clear()
    harness.engine.step()
    harness.engine.step()
    assert len(runner.stepped) == 2
    assert harness.engine.num_running == 2
    harness.run()
    assert ids(harness, search) == alone(search.request, manifest)  # type: ignore[arg-type]


def test_a_short_prompt_overtakes_a_long_one_which_still_makes_progress(manifest: Manifest) -> None:
    runner = Timed(8, manifest)
    harness, order = runner.harness, list[str]()
    harness.submit(request(prompt(200), "long"), lambda _: order.append("long"))
    harness.engine.step()
    for seed in range(3):
        name = f"short {seed}"
        harness.submit(request(prompt(20, seed + 1), name), lambda _, name=name: order.append(name))  # type: ignore[misc]
    for _ in range(9):  # after the end of a prompt, a call only steps the rows
        harness.engine.step()
    assert len(runner.prefilled) == 4 * PREFILL_TOKENS + 3 * 20
    harness.run()
    assert order[-1] == "long"


def test_samples_of_one_prompt_share_its_prefill(manifest: Manifest) -> None:
    runner, source = Timed(8, manifest), prompt(150)
    harness = runner.harness
    samples = [harness.submit(request(source, parameters=SAMPLED, seed=seed)) for seed in range(4)]
    search = harness.submit(request(source, parameters=BEAMS))
    harness.engine.step(limit_s=0.001)  # a limit of batches, not of prompts
    harness.run()
    assert runner.prefilled == list(source)
    for active in (*samples, search):
        assert ids(harness, active) == alone(active.request, manifest)  # type: ignore[arg-type]


def test_other_calls_and_encode_requests_do_not_share_a_prefill(manifest: Manifest) -> None:
    runner, source = Timed(8, manifest), prompt(50)
    harness = runner.harness
    for call in ("a", "b"):
        harness.submit(request(source, call))
    harness.submit(EncodeRequest("a", source, FAR))
    harness.run()
    assert len(runner.prefilled) == 3 * 50


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1), (2, 0), (0, 1, 2)])
def test_a_shared_prefill_survives_the_cancellation_of_some_requests(
    victims: tuple[int, ...], manifest: Manifest
) -> None:
    runner, source = Timed(8, manifest), prompt(150)
    harness = runner.harness
    kinds = (SAMPLED, BEAMS, GREEDY)
    handles = [harness.submit(request(source, parameters=kind)) for kind in kinds]
    other = harness.submit(request(prompt(70, 1), "other"))
    for victim in (None, *victims):
        if victim is not None:
            harness.engine.cancel(handles[victim])
        harness.engine.step()
    harness.run()
    for index, active in enumerate(handles):
        if index in victims:
            assert harness.final(active) == Cancelled()
        else:
            assert ids(harness, active) == alone(active.request, manifest)  # type: ignore[arg-type]
    assert ids(harness, other) == alone(other.request, manifest)  # type: ignore[arg-type]
    if len(victims) < len(handles):
        assert len(runner.prefilled) == 150 + 70  # nothing was read twice


def test_a_deadline_ends_a_prefill(manifest: Manifest) -> None:
    runner = Timed(4, manifest)
    harness = runner.harness
    late = harness.submit(replace(request(prompt(200)), deadline=2.5 * BUDGET_S))
    other = harness.submit(request(prompt(100, 1), "other"))
    harness.run()
    assert harness.final(late) == Failed("deadline_exceeded")
    assert ids(harness, other) == alone(other.request, manifest)  # type: ignore[arg-type]
    assert len(runner.prefilled) < 200 + 100


def test_results_do_not_depend_on_the_batch_or_the_time_of_arrival(manifest: Manifest) -> None:
    """Requests arrive, end and are cancelled while others are in prefill."""
    rng = Random(5)
    runner = Timed(9, manifest, seconds=0.7 * BUDGET_S)
    harness = runner.harness
    lengths = (1, 2, 20, 33, 64, 65, 100, 180)
    kinds = (GREEDY, SAMPLED, BEAMS, GenerateParameters(repetition_penalty=1.5, min_new_tokens=9))
    requests = [
        request(prompt(rng.choice(lengths), rng.randrange(9)), f"c{rng.randrange(12)}", parameters=rng.choice(kinds))
        for _ in range(120)
    ]
    handles, cancelled = [], set()
    for one in requests:
        handles.append(harness.submit(one))
        if rng.random() < 0.2:
            victim = rng.choice(handles)
            cancelled.add(victim)
            harness.engine.cancel(victim)
        for _ in range(rng.randrange(3)):
            harness.engine.step()
    harness.run()
    assert runner.num_moved and runner.num_swapped and runner.num_branched
    for one, active in zip(requests, handles, strict=True):
        if active in cancelled and harness.final(active) == Cancelled():
            continue
        assert ids(harness, active) == alone(one, manifest)


def test_encode_requests_return_the_hidden_states_of_the_prompt(manifest: Manifest) -> None:
    runner = Timed(2, manifest)
    harness = runner.harness
    running = [
        harness.submit(request(prompt(5, seed), parameters=GenerateParameters(min_new_tokens=9))) for seed in (1, 2)
    ]
    harness.engine.step()
    sources = [prompt(length, length) for length in (1, 31, 32, 33, 100)]
    encoded = [harness.submit(EncodeRequest("e", source, FAR)) for source in sources]
    harness.engine.step()
    assert harness.engine.num_waiting == len(sources)  # all rows are in use
    harness.run()
    for source, active in zip(sources, encoded, strict=True):
        final = harness.final(active)
        assert isinstance(final, Encoded)
        np.testing.assert_array_equal(final.hidden, np.array(source)[:, None] * np.arange(1, HIDDEN + 1))
    for active in running:
        assert ids(harness, active) == alone(active.request, manifest)  # type: ignore[arg-type]


# Faults


@pytest.mark.parametrize("call", range(1, 8))
def test_a_prefill_that_fails_ends_the_requests_with_that_prompt_alone(
    call: int, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Timed(8, manifest, faults=Faults(prefill_calls=frozenset({call})))
    harness = runner.harness
    requests = [
        *[request(prompt(100), "samples", parameters=SAMPLED, seed=seed) for seed in range(2)],
        request(prompt(90, 1), "search", parameters=BEAMS),
        request(prompt(33, 2), "short"),
    ]
    handles = [harness.submit(one) for one in requests]
    harness.run()
    failed = {active.request.request_id for active in handles if harness.final(active) == Failed("internal")}
    assert len(failed) == 1
    for one, active in zip(requests, handles, strict=True):
        if one.request_id not in failed:
            assert ids(harness, active) == alone(one, manifest)
    first, *_ = caplog.records
    assert first.getMessage() == "the decoder failed on a prompt"
    assert harness.engine.num_running == 0


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_prompt_with_values_that_are_not_finite_fails_alone(position: int, manifest: Manifest) -> None:
    harness = Harness(runner=CheckedRunner(4, manifest, Faults(nan_id=BREAKING)))
    tokens = list(prompt(50))
    tokens[position] = BREAKING
    bad = harness.submit(request(tokens, "bad"))
    good = harness.submit(request(prompt(50), "good"))
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert ids(harness, good) == alone(good.request, manifest)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", range(2, 9))  # two rows are running from the second step on
def test_a_failed_step_does_not_affect_prompts_in_prefill(call: int, manifest: Manifest) -> None:
    runner = Timed(8, manifest, faults=Faults(step_calls=frozenset({call})))
    harness = runner.harness
    requests = [
        request(prompt(3, seed), f"c{seed}", parameters=GenerateParameters(min_new_tokens=9)) for seed in (1, 2)
    ]
    requests += [request(prompt(150), "long"), request(prompt(90, 4), "search", parameters=BEAMS)]
    handles = [harness.submit(one) for one in requests]
    harness.run()
    for one, active in zip(requests, handles, strict=True):
        assert ids(harness, active) == alone(one, manifest)


def test_a_decoder_that_fails_for_all_running_rows_leaves_prompts_in_prefill(manifest: Manifest) -> None:
    runner = Timed(4, manifest, faults=Faults(step_calls=frozenset({2})))
    harness = runner.harness
    running = harness.submit(request(prompt(1), "running"))
    long = harness.submit(request(prompt(150, 1), "long"))
    harness.run()
    assert harness.final(running) == Failed("internal")
    assert ids(harness, long) == alone(long.request, manifest)  # type: ignore[arg-type]
    assert len(runner.prefilled) == 1 + 150


class Breaking(FakeRunner):
    """Runner whose prefill raises for prompts with the token BREAKING, or always."""

    def __init__(self, manifest: Manifest, test_input_fails: bool) -> None:
        super().__init__(manifest, 4)
        self.test_rows: list[int] = []  # rows of the test input
        self._test_input_fails = test_input_fails

    def prefill(self, row: int, token_ids: Int64, length: int, outputs: Sequence[str] = ()) -> Mapping[str, Array]:
        is_test = bool((token_ids == self.manifest.tokens.end_id).all())
        if is_test:
            self.test_rows.append(row)
        if (token_ids == BREAKING).any() or (is_test and self._test_input_fails):
            raise FakeFaultError("prefill")
        return super().prefill(row, token_ids, length, outputs)


def test_prompts_that_cause_failures_do_not_end_an_engine_that_runs_the_known_input(manifest: Manifest) -> None:
    runner = Breaking(manifest, test_input_fails=False)
    harness = Harness(runner=runner)
    running = [
        harness.submit(request(prompt(9, seed), parameters=GenerateParameters(min_new_tokens=100, max_new_tokens=100)))
        for seed in (1, 2)
    ]
    for _ in range(2):
        harness.engine.step()
    for number in range(2 * MAX_FAILURES):
        bad = harness.submit(request((5, BREAKING, 6), f"call {number}"))
        harness.engine.step()
        assert harness.final(bad) == Failed("internal")
    assert runner.test_rows == [2, 2]  # a free row
    harness.run()
    for active in running:
        assert ids(harness, active) == alone(active.request, manifest)  # type: ignore[arg-type]


def test_a_prefill_that_fails_on_the_known_input_ends_the_engine(manifest: Manifest) -> None:
    harness = Harness(runner=Breaking(manifest, test_input_fails=True))
    for number in range(MAX_FAILURES - 1):
        harness.submit(request((5, BREAKING, 6), f"call {number}"))
        harness.run()
    harness.submit(request((5, BREAKING, 6), "one more"))
    with pytest.raises(
        RuntimeFailedError,
        match=f"^the decoder graph failed on prompts of {MAX_FAILURES} calls in succession and on the test input$",
    ):
        harness.run()


def test_prefill_failures_with_a_success_between_them_do_not_add_up(manifest: Manifest) -> None:
    harness = Harness(runner=FakeRunner(manifest, 4, faults=Faults(prefill_calls=frozenset(range(1, 200, 2)))))
    for number in range(3 * MAX_FAILURES):
        harness.submit(request((5, 6, 7), f"call {number}"))
        harness.run()
