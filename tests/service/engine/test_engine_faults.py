"""A failure of one request does not affect others, and is logged."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from sightline.base.bundle import Manifest
from sightline.service.engine.checks import MAX_FAILURES, GraphName, RuntimeFailedError
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.request import (
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Final,
    Generated,
    GenerateRequest,
    Request,
)
from sightline.service.parameters import FORCED, GenerateParameters
from sightline.service.runtime.runner import Array, Int32, Int64, Runner
from tests.service.engine.conftest import FAR, SOURCES, CheckedRunner, Harness, StopAfter, run_alone
from tests.service.faulty import Fault, FaultyRunner
from tests.support.fake_runner import (
    GARBAGE,
    FakeFaultError,
    FakeRunner,
    Faults,
    fake_classifier_manifest,
    fake_manifest,
    fake_masked_manifest,
)

BREAKING = 40  # a source token


class Breaking(FakeRunner):
    """Runner with a graph that raises for sources with the token BREAKING."""

    def __init__(self, graph: GraphName, known_is_finite: bool = True) -> None:
        super().__init__(fake_manifest(), 4)
        self._graph = graph
        self._known_is_finite = known_is_finite
        self.num_known = 0  # runs of the encoder on the test input

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        if self._graph == "encoder" and (source_ids == BREAKING).any():
            raise FakeFaultError("encoder")
        given = dict(super().run_encoder(source_ids, source_lengths, outputs))
        if (source_ids == self.manifest.tokens.end_id).all():
            self.num_known += 1
            if not self._known_is_finite:
                given["hidden" if self._graph == "encoder" else "source_state"][0] = np.nan
        return given

    def step(self, *arguments: Any, first: int = 0, **options: Any) -> Mapping[str, Array]:
        rows = slice(first, first + len(arguments[0]))
        if self._graph == "decoder" and (self._source[rows] == BREAKING).any():
            raise FakeFaultError("step")
        return super().step(*arguments, first=first, **options)


class BadFirstState(FakeRunner):
    """Runner whose encoder returns one infinite value, which the decoder does not pass on."""

    def __init__(self, name: str, value: float, in_padding: bool = False) -> None:
        super().__init__(first_hash_manifest(), 8)
        self._name = name
        self._value = value
        self._in_padding = in_padding

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        names = [name for name in outputs if name != "first_hash"]
        given = dict(super().run_encoder(source_ids, source_lengths, names))
        given["first_hash"] = np.zeros((len(source_ids), 1), np.float32)
        for row in np.flatnonzero((source_ids == BREAKING).any(axis=1)):
            position = source_lengths[row] if self._in_padding else source_lengths[row] - 1
            given[self._name][row, position if self._name == "source_state" else 0] = self._value
        return given

    def init_rows(
        self,
        first: int,
        encoded: Mapping[str, Array],
        examples: Sequence[int],
        visible: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().init_rows(
            first, {"source_state": np.nan_to_num(encoded["source_state"], nan=GARBAGE)}, examples, visible
        )


def first_hash_manifest() -> Manifest:
    """Return a manifest with a state of fixed size from the encoder, as in a recurrent model."""
    manifest = fake_manifest()
    encoder = manifest.encoder_graph.model_copy(update={"outputs": (*manifest.encoder_graph.outputs, "first_hash")})
    states = [
        state.model_copy(update={"init": "encoder", "encoder_output": "first_hash"}) if state.input == "hash" else state
        for state in manifest.states
    ]
    return manifest.model_copy(update={"encoder": encoder, "states": tuple(states)})


@pytest.mark.parametrize(
    ("kind", "faults", "cause"),
    [
        (GenerateRequest, Faults(nan_id=9), "not finite"),
        (EncodeRequest, Faults(nan_id=9), "not finite"),
        (GenerateRequest, Faults(raising_id=9), "the encoder failed"),
        (GenerateRequest, Faults(step_calls=frozenset({1})), "a decoder step failed"),
    ],
)
def test_the_log_has_the_request_id_of_each_failure(
    caplog: pytest.LogCaptureFixture, kind: Callable[..., Request], faults: Faults, cause: str
) -> None:
    """Regression: the engine logged no request id, and nothing for values that are not finite."""
    harness = Harness(faults=faults)
    active = harness.submit(kind("my-id", (9, 5), FAR))
    harness.run()
    assert harness.final(active) == Failed("internal")
    what, who = caplog.records
    assert cause in what.getMessage()
    assert vars(who)["fields"] == {"request_id": "my-id"}


def test_a_source_that_breaks_the_encoder_fails_alone() -> None:
    harness = Harness(faults=Faults(raising_id=40))
    good, bad, encode = harness.generate((5, 6)), harness.generate((5, 40)), harness.encode((7, 8))
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert harness.ids(good) == harness.expected((5, 6))
    assert isinstance(harness.final(encode), Encoded)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    harness = Harness(faults=Faults(nan_id=40))
    parameters = GenerateParameters(do_sample=True)
    bad = [harness.generate((5, 40)), harness.generate((40,), parameters=parameters), harness.encode((40, 5))]
    good = harness.generate((5, 6))
    harness.run()
    assert [harness.final(active) for active in bad] == [Failed("internal")] * 3
    assert harness.ids(good) == harness.expected((5, 6))


LONG = GenerateParameters(min_new_tokens=12, max_new_tokens=12)
MATES = [  # all in one batch, of 8 rows, for 12 steps
    GenerateRequest("greedy", SOURCES[1], FAR, LONG, stream=True),
    GenerateRequest(
        "sampled", SOURCES[2], FAR, LONG.model_copy(update={"do_sample": True, "seed": 3, "temperature": 2.0})
    ),
    GenerateRequest("beams", SOURCES[3], FAR, LONG.model_copy(update={"num_beams": 3, "num_return_sequences": 3})),
    GenerateRequest("mapped", SOURCES[4], FAR, LONG, attention=frozenset({"cross", "decoder"})),
    GenerateRequest(
        "beams after a prefix", SOURCES[5], FAR, LONG.model_copy(update={"num_beams": 2}), target_prefix=(7, 8, 9)
    ),
]


def run_mates(runner: Runner) -> list[tuple[list[Event], Final]]:
    """Return the events of each of the requests."""
    harness = Harness(runner=runner)
    handles = [harness.submit(request) for request in MATES]
    harness.run()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (0, 0)
    return [(harness.events[active], harness.final(active)) for active in handles]


def assert_same_results(given: Final, expected: Final) -> None:
    assert isinstance(given, Generated) and isinstance(expected, Generated)
    for target, right in zip(given.targets, expected.targets, strict=True):
        assert (target.tokens, target.finish_reason, target.score) == (right.tokens, right.finish_reason, right.score)
        assert target.attention.keys() == right.attention.keys()
        for kind, array in right.attention.items():
            np.testing.assert_array_equal(target.attention[kind], array)


@pytest.mark.parametrize("call", range(1, 13))
def test_a_step_that_fails_once_changes_no_result(call: int) -> None:
    """Regression: a failed step failed all rows. Partial writes are overwritten by the retry."""
    faults = Faults(step_calls=frozenset({call}))
    expected, given = run_mates(FakeRunner(fake_manifest(), 8)), run_mates(CheckedRunner(8, faults=faults))
    for (events, final), (right_events, right) in zip(given, expected, strict=True):
        assert_same_results(final, right)
        assert events[:-1] == right_events[:-1]


@pytest.mark.parametrize("call", range(1, 13))
@pytest.mark.parametrize("victim", range(len(MATES)))
def test_a_request_whose_row_breaks_the_decoder_fails_alone(call: int, victim: int) -> None:
    row = [0, 1, 2, 3, 4, 4, 2, 2].index(victim)  # the first step skips the last two rows
    expected, given = (
        run_mates(cast(Runner, FaultyRunner(FakeRunner(fake_manifest(), 8), Fault("step", number, "poison", row=row))))
        for number in (0, call)
    )
    for index, ((_, final), (_, right)) in enumerate(zip(given, expected, strict=True)):
        if index == victim:
            assert final == Failed("internal")
        else:
            assert_same_results(final, right)


def test_a_request_that_runs_alone_is_not_retried_after_a_failed_step() -> None:
    harness = Harness(max_rows=2, faults=Faults(step_calls=frozenset({2})))
    alone = harness.generate(SOURCES[0])
    harness.run()
    assert harness.final(alone) == Failed("internal")
    next_one = harness.generate(SOURCES[2])
    harness.run()
    assert harness.ids(next_one) == harness.expected(SOURCES[2])


def test_a_decoder_that_fails_for_every_row_ends_running_requests_and_the_engine_continues() -> None:
    harness = Harness(max_rows=2, faults=Faults(step_calls=frozenset({2, 3, 4})))
    handles = [harness.generate(source) for source in SOURCES[:3]]
    harness.engine.step()
    harness.engine.step()
    assert harness.final(handles[0]) == harness.final(handles[1]) == Failed("internal")
    assert harness.engine.num_running == 0
    harness.run()
    assert harness.ids(handles[2]) == harness.expected(SOURCES[2])


@pytest.mark.parametrize("graph", ["encoder", "decoder"])
def test_calls_that_cause_failures_do_not_end_an_engine_that_runs_the_known_input(graph: GraphName) -> None:
    """Regression: eight failing calls in succession ended the process."""
    runner = Breaking(graph)
    harness = Harness(runner=runner)
    for number in range(3 * MAX_FAILURES):
        assert ask(harness, f"call {number}", (5, BREAKING)) == [Failed("internal")]
    assert runner.num_known == 3
    good = harness.generate((5, 6))
    harness.run()
    assert harness.ids(good) == harness.expected((5, 6))


ALWAYS, EVERY_OTHER = frozenset(range(1, 100)), frozenset(range(1, 200, 2))


@pytest.mark.parametrize(
    "make",
    [
        *(lambda graph=graph: Breaking(graph, known_is_finite=False) for graph in ("encoder", "decoder")),
        lambda: FakeRunner(fake_manifest(), 4, faults=Faults(encode_calls=ALWAYS)),
        lambda: FakeRunner(fake_manifest(), 4, faults=Faults(step_calls=ALWAYS)),
    ],
    ids=["encoder not finite", "decoder not finite", "encoder", "step"],
)
def test_a_graph_that_fails_for_the_known_input_too_ends_the_engine(make: Callable[[], Runner]) -> None:
    """Regression: a broken engine stayed ready and failed every call."""
    harness = Harness(runner=make())
    for number in range(MAX_FAILURES - 1):
        assert ask(harness, f"call {number}", (5, BREAKING)) == [Failed("internal")]
    with pytest.raises(
        RuntimeFailedError, match=f"failed for {MAX_FAILURES} calls in succession and on the test input"
    ):
        ask(harness, "one more", (5, BREAKING))


def test_the_known_input_does_not_affect_running_rows() -> None:
    """The test input must not overwrite the states of running rows."""
    runner = Breaking("encoder")
    harness = Harness(runner=runner)
    running = [harness.generate(source, parameters=LONG) for source in SOURCES[:2]]
    harness.engine.step()
    for number in range(MAX_FAILURES):
        harness.submit(GenerateRequest(f"call {number}", (5, BREAKING), FAR))
        harness.engine.step()
    assert runner.num_known == 1
    assert harness.engine.num_running == 2
    harness.run()
    for active, source in zip(running, SOURCES, strict=False):
        assert isinstance(active.request, GenerateRequest)
        assert harness.generated(active).targets == run_alone(active.request, runner.manifest).targets, source


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["source_state", "first_hash"])
def test_a_first_state_that_is_not_finite_fails_its_own_request_alone(
    caplog: pytest.LogCaptureFixture, name: str, value: float
) -> None:
    """The decoder may convert NaN to finite scores, as a quantised product does."""
    runner = BadFirstState(name, value)
    harness = Harness(runner=runner)
    sources = [(5, 6, 7), (BREAKING, 8), (9, 10, 11, 12), (13, 14)]
    handles = [harness.generate(source) for source in sources]
    encoding = harness.encode((15, 16))
    harness.run()
    assert runner.num_encodes == 1  # no graph has failed, so there is no retry
    assert harness.final(handles[1]) == Failed("internal")
    assert [record.getMessage() for record in caplog.records][:1] == ["the encoder returned values that are not finite"]
    for index in (0, 2, 3):
        assert harness.ids(handles[index]) == harness.expected(sources[index])
    assert isinstance(harness.final(encoding), Encoded)


def test_padding_that_is_not_finite_is_no_fault() -> None:
    harness = Harness(runner=BadFirstState("source_state", np.nan, in_padding=True))
    sources = [(BREAKING, 8), (9, 10, 11, 12)]
    handles = [harness.generate(source) for source in sources]
    harness.run()
    assert [harness.ids(active) for active in handles] == [harness.expected(source) for source in sources]


def generation(source: tuple[int, ...] = (5,), **fields: Any) -> GenerateRequest:
    return GenerateRequest("g", source, FAR, **fields)


def encoding(source: tuple[int, ...] = (5,), **fields: Any) -> EncodeRequest:
    return EncodeRequest("e", source, FAR, **fields)


BEAMS = GenerateParameters(num_beams=2)
MANIFESTS = {
    "encoder-decoder": fake_manifest(),
    "decoder-only": fake_manifest(decoder_start="source"),
    "classifier": fake_classifier_manifest(),
    "masked": fake_masked_manifest(),
}
WRONG_REQUESTS = [
    *(make(source) for make in (generation, encoding) for source in ((), (5,) * 25, (48,), (-1,))),
    generation(parameters=FORCED),
    generation(target_prefix=(5,) * 24),
    generation(target_prefix=(5,) * 25, parameters=FORCED),
    *(generation(target_prefix=prefix) for prefix in ((48, 2), (-1,))),
    generation(parameters=GenerateParameters(suppress_tokens=(3, 48))),
    generation(parameters=GenerateParameters(logit_bias=((48, 1.0),))),
    generation(parameters=GenerateParameters.model_construct(do_sample=True, seed=-1)),
    *(generation(parameters=GenerateParameters.model_construct(num_beams=count)) for count in (0, 5)),
    *(generation(parameters=BEAMS.model_copy(update={"num_return_sequences": count})) for count in (0, 3)),
    generation(parameters=BEAMS.model_copy(update={"do_sample": True})),
    generation(parameters=BEAMS, stream=True),
    generation(parameters=FORCED.model_copy(update={"num_beams": 2}), target_prefix=(5,) * 24),
    generation(attention=frozenset({"sideways", "encoder_slots"})),
    generation(attention=frozenset({"decoder"}), prompt_rows=True),
    *(generation((5, 6, 7), hidden_source_tokens=ids) for ids in [(-1,), (99,), (1, 0), (1, 1), (0, 1, 2)]),
    encoding(attention=frozenset({"cross", "sideways"})),
    encoding(return_labels=True),
    encoding(return_logits=True),
    encoding(return_largest=True),
    encoding(predicted=(1,)),
]


@pytest.mark.parametrize("kind", MANIFESTS)
@pytest.mark.parametrize("wrong", WRONG_REQUESTS, ids=lambda one: str(WRONG_REQUESTS.index(one)))
def test_a_request_that_the_model_cannot_run_does_not_affect_others(wrong: Request, kind: str) -> None:
    manifest = MANIFESTS[kind]
    harness = Harness(runner=CheckedRunner(max_rows=4, manifest=manifest))
    make = harness.encode if manifest.decoder is None else harness.generate
    before = make(SOURCES[1])
    ended = harness.submit(wrong)
    after = make(SOURCES[2])
    harness.run()
    assert harness.final(ended)
    for active, source in zip((before, after), SOURCES[1:], strict=False):
        if manifest.decoder is None:
            assert isinstance(harness.final(active), Encoded)
        else:
            assert harness.ids(active) == harness.expected(source)


@pytest.mark.parametrize(
    "wrong", [generation(parameters=GenerateParameters(num_beams=5)), generation((5,) * 25), generation(())]
)
def test_a_request_beyond_the_rows_or_positions_of_the_model_fails(wrong: Request) -> None:
    harness = Harness()
    ended = harness.submit(wrong)
    harness.run()
    assert harness.final(ended) == Failed("internal")


def test_exceptions_of_sinks_stop_conditions_and_observers_do_not_affect_other_requests() -> None:
    class Broken(EngineObserver):
        def on_step(self, rows: int, seconds: float) -> None:
            raise RuntimeError("observer")

    class BrokenStop(StopAfter):
        def update(self, token_id: int) -> bool:
            raise RuntimeError("stop")

    def broken_sink(event: Event) -> None:
        raise RuntimeError("sink")

    harness = Harness(observer=Broken())
    harness.generate(SOURCES[1], sink=broken_sink, stream=True)
    bad = harness.generate(SOURCES[2], stop=BrokenStop(1))
    good = harness.generate(SOURCES[3])
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert harness.ids(good) == harness.expected(SOURCES[3])


def ask(harness: Harness, call: str, *sources: tuple[int, ...]) -> list[Final]:
    """Return the final events of the requests of one call."""
    parameters = GenerateParameters(max_new_tokens=1)
    handles = [harness.submit(GenerateRequest(call, source, FAR, parameters=parameters)) for source in sources]
    harness.run()
    return [harness.final(active) for active in handles]


@pytest.mark.parametrize(
    "faults", [Faults(step_calls=EVERY_OTHER), Faults(encode_calls=EVERY_OTHER)], ids=["step", "encoder"]
)
def test_failures_with_a_success_between_them_do_not_add_up(faults: Faults) -> None:
    harness = Harness(faults=faults)
    finals = [ask(harness, f"call {number}", (5, 6)) for number in range(3 * MAX_FAILURES)]
    assert finals.count([Failed("internal")]) == 3 * MAX_FAILURES / 2


def test_failures_of_a_single_call_do_not_end_the_engine() -> None:
    """Regression: one call with eight bad inputs ended the process."""
    harness = Harness(max_rows=2, faults=Faults(raising_id=40))
    bad = ask(harness, "poison", *[(5, 40)] * 3 * MAX_FAILURES)
    assert bad == [Failed("internal")] * len(bad)
    good = harness.generate((5, 6))
    harness.run()
    assert harness.ids(good) == harness.expected((5, 6))


def test_a_batch_with_one_success_is_no_failure() -> None:
    harness = Harness(faults=Faults(raising_id=40))
    for number in range(2 * MAX_FAILURES):
        assert Failed("internal") in ask(harness, f"call {number}", (5, 40), (5, 6))
