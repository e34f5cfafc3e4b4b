from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from service.engine.engine import Engine
from service.engine.generation import Handle, Sink
from service.engine.observer import NullObserver
from service.engine.request import (
    Cancelled,
    DecodingParameters,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Final,
    Generated,
    GenerateRequest,
    Request,
    TokenEvent,
)
from service.runtime.fake import FakeRunner, Faults, fake_manifest

FAR = 1e9
SOURCES = [tuple(range(3 + start, 5 + 2 * start)) for start in range(9)]  # 2 to 10 tokens


class Harness:
    """An engine on the fake runner, a clock that stands still, and what came to each sink."""

    def __init__(self, max_rows: int = 4, faults: Faults | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.runner = FakeRunner(fake_manifest(), max_rows, faults=faults)
        self.engine = Engine(self.runner, lambda: self.now, **settings)
        self.events: dict[Handle, list[Event]] = {}

    def submit(self, request: Request, sink: Sink | None = None) -> Handle:
        events: list[Event] = []
        handle = self.engine.submit(request, sink or events.append)
        self.events[handle] = events
        return handle

    def generate(self, source: Sequence[int], deadline: float = FAR, sink: Sink | None = None, **fields: Any) -> Handle:
        return self.submit(GenerateRequest("g", tuple(source), deadline, **fields), sink)

    def encode(self, source: Sequence[int], deadline: float = FAR) -> Handle:
        return self.submit(EncodeRequest("e", tuple(source), deadline))

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def final(self, handle: Handle) -> Final:
        finals = [event for event in self.events[handle] if not isinstance(event, TokenEvent)]
        assert len(finals) == 1
        assert self.events[handle][-1] is finals[0]
        return finals[0]

    def generated(self, handle: Handle) -> Generated:
        final = self.final(handle)
        assert isinstance(final, Generated), final
        return final

    def ids(self, handle: Handle) -> list[int]:
        return [token.id for token in self.generated(handle).tokens]


def test_greedy_says_what_the_model_says() -> None:
    harness = Harness()
    handle = harness.generate(SOURCES[3])
    harness.run()
    assert harness.ids(handle) == harness.runner.expected(SOURCES[3], 24)
    assert harness.generated(handle).finish_reason == "eos"
    assert harness.generated(handle).tokens[-1].id == 2
    assert (harness.engine.num_running, harness.engine.num_waiting) == (0, 0)


def test_more_requests_than_rows_say_what_each_says_alone() -> None:
    harness = Harness(max_rows=3)
    handles = [harness.generate(source) for source in SOURCES]
    harness.run()
    assert [harness.ids(handle) for handle in handles] == [harness.runner.expected(one, 24) for one in SOURCES]


def test_what_is_being_encoded_is_still_there_for_whoever_looks() -> None:
    """Requests in the encoder were in no count: an engine with work looked idle from another thread."""
    seen = []

    class Onlooker(NullObserver):
        def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
            seen.append((harness.engine.has_work, harness.engine.num_waiting))

    harness = Harness(observer=Onlooker())
    handles = [harness.generate(SOURCES[1]), harness.encode(SOURCES[1])]
    harness.engine.step()
    assert seen == [(True, 2)]
    assert (harness.engine.num_running, harness.engine.num_waiting) == (1, 0)
    harness.run()
    assert all(harness.final(handle) for handle in handles)


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        (Faults(nan_id=9), "not finite"),
        (Faults(raising_id=9), "the encoder failed"),
        (Faults(step_calls=frozenset({1})), "a decoder step failed"),
    ],
)
def test_the_log_has_what_failed_by_its_request_id(
    caplog: pytest.LogCaptureFixture, faults: Faults, cause: str
) -> None:
    """Errors promise that it has; no line of the engine had an id, and numbers that are not finite had no line."""
    harness = Harness(faults=faults)
    handle = harness.submit(GenerateRequest("my-id", (9, 5), FAR))
    harness.run()
    assert harness.final(handle) == Failed("internal")
    what, who = caplog.records
    assert cause in what.getMessage()
    assert vars(who)["fields"] == {"request_id": "my-id"}


def test_an_encoding_that_is_not_finite_is_in_the_log_too(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(faults=Faults(nan_id=9))
    handle = harness.submit(EncodeRequest("my-id", (9, 5), FAR))
    harness.run()
    assert harness.final(handle) == Failed("internal")
    what, who = caplog.records
    assert "not finite" in what.getMessage()
    assert vars(who)["fields"] == {"request_id": "my-id"}


def test_requests_join_between_two_steps() -> None:
    harness = Harness()
    first = harness.generate(SOURCES[1])
    harness.engine.step()
    second = harness.generate(SOURCES[2])
    harness.engine.step()
    assert harness.engine.num_running == 2
    harness.run()
    assert harness.ids(first) == harness.runner.expected(SOURCES[1], 24)
    assert harness.ids(second) == harness.runner.expected(SOURCES[2], 24)


def test_max_new_tokens_ends_with_length() -> None:
    harness = Harness()
    handle = harness.generate(SOURCES[3], parameters=DecodingParameters(max_new_tokens=2))
    harness.run()
    assert harness.ids(handle) == harness.runner.expected(SOURCES[3], 24)[:2]
    assert harness.generated(handle).finish_reason == "length"


def test_the_models_own_limit_ends_with_length() -> None:
    harness = Harness()
    parameters = DecodingParameters(max_new_tokens=1000, min_new_tokens=1000)
    handle = harness.generate(SOURCES[3], parameters=parameters)
    harness.run()
    assert len(harness.ids(handle)) == harness.runner.manifest.limits.max_target_tokens
    assert harness.generated(handle).finish_reason == "length"


class StopAfter:
    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def update(self, token_id: int) -> bool:
        self.left -= 1
        return self.left == 0


def test_a_stop_condition_ends_with_stop() -> None:
    harness = Harness()
    handle = harness.generate(SOURCES[3], stop=StopAfter(2))
    harness.run()
    assert harness.ids(handle) == harness.runner.expected(SOURCES[3], 24)[:2]
    assert harness.generated(handle).finish_reason == "stop"


def test_min_new_tokens_keeps_the_end_token_away() -> None:
    harness = Harness()
    natural = len(harness.runner.expected(SOURCES[3], 24))
    handle = harness.generate(SOURCES[3], parameters=DecodingParameters(min_new_tokens=natural + 3))
    harness.run()
    assert len(harness.ids(handle)) > natural
    assert 2 not in harness.ids(handle)[: natural + 3]


def test_a_forced_target_is_scored_as_the_model_would_have() -> None:
    harness = Harness()
    free = harness.generate(SOURCES[3])
    harness.run()
    target = tuple(harness.ids(free))
    forced, other = (
        harness.generate(SOURCES[3], forced_target=target),
        harness.generate(SOURCES[3], forced_target=(2, 7)),
    )
    harness.run()
    assert harness.generated(forced).tokens == harness.generated(free).tokens
    assert harness.generated(forced).finish_reason == harness.generated(other).finish_reason == "forced"
    assert harness.ids(other) == [2, 7]  # not even the end token ends it early
    assert harness.generated(other).score < 0


def test_the_same_seed_says_the_same_alone_and_in_company() -> None:
    parameters = DecodingParameters(do_sample=True, temperature=3.0, top_k=20, top_p=0.95, seed=11)
    alone = Harness()
    lone = alone.generate(SOURCES[5], parameters=parameters)
    alone.run()
    company = Harness()
    for seed, source in enumerate(SOURCES):
        company.generate(source, parameters=DecodingParameters(do_sample=True, seed=seed))
    company.engine.step()
    handle = company.generate(SOURCES[5], parameters=parameters)
    company.run()
    assert company.ids(handle) == alone.ids(lone)
    assert company.ids(handle) != alone.runner.expected(SOURCES[5], 24)


def test_an_encode_request_gets_the_last_layer_without_padding_and_without_a_row() -> None:
    harness = Harness(max_rows=1)
    harness.generate(SOURCES[0], parameters=DecodingParameters(min_new_tokens=20))
    harness.engine.step()
    handles = [harness.encode(source) for source in (SOURCES[2], SOURCES[1])]
    harness.engine.step()
    for handle, source in zip(handles, (SOURCES[2], SOURCES[1]), strict=True):
        encoded = harness.final(handle)
        assert isinstance(encoded, Encoded)
        np.testing.assert_array_equal(encoded.hidden, np.outer(source, [1, 2, 3, 4]))
    assert harness.engine.num_running == 1


def test_streamed_tokens_are_those_of_the_result() -> None:
    harness = Harness()
    handle = harness.generate(SOURCES[3], stream=True)
    harness.run()
    streamed = [event.token for event in harness.events[handle] if isinstance(event, TokenEvent)]
    assert tuple(streamed) == harness.generated(handle).tokens


def test_the_runner_is_asked_only_for_what_running_rows_need() -> None:
    asked: list[set[str]] = []

    class Asked(FakeRunner):
        def step(self, *arguments: Any) -> Any:
            asked.append(set(arguments[3]))
            return super().step(*arguments)

    engine = Engine(Asked(fake_manifest(), 4), lambda: 0.0)
    greedy = {"top_ids", "top_logits", "log_normalizer"}

    def ask(**fields: Any) -> set[str]:
        handle = engine.submit(GenerateRequest("r", SOURCES[4], FAR, **fields), lambda _: None)
        engine.step()
        engine.cancel(handle)
        return asked[-1]

    assert ask() == greedy
    assert ask(attention=frozenset({"encoder"})) == greedy
    assert ask(attention=frozenset({"cross"})) == greedy | {"cross_attention_0", "cross_attention_1"}
    assert ask(parameters=DecodingParameters(do_sample=True)) == {"logits", "log_normalizer"}
    assert ask(forced_target=(3, 2)) == {"logits", "log_normalizer"}
    engine.submit(GenerateRequest("r", SOURCES[4], FAR), lambda _: None)
    assert ask(parameters=DecodingParameters(do_sample=True)) == greedy | {"logits"}


def test_cancelling_frees_the_row_before_the_next_step() -> None:
    harness = Harness(max_rows=1)
    running, waiting = harness.generate(SOURCES[3]), harness.generate(SOURCES[4])
    harness.engine.step()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (1, 1)
    harness.engine.cancel(running)
    harness.engine.cancel(running)
    harness.engine.step()
    assert harness.final(running) == Cancelled()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (1, 0)
    harness.run()
    harness.engine.cancel(waiting)  # too late
    harness.engine.step()
    assert harness.ids(waiting) == harness.runner.expected(SOURCES[4], 24)


def test_a_cancelled_request_that_waits_is_never_encoded() -> None:
    harness = Harness()
    handle = harness.generate(SOURCES[3])
    harness.engine.cancel(handle)
    harness.engine.step()
    assert harness.final(handle) == Cancelled()
    assert harness.runner.num_encodes == 0
    assert not harness.engine.has_work


def test_a_deadline_ends_a_running_request_and_no_other() -> None:
    harness = Harness()
    late, other = harness.generate(SOURCES[3], deadline=1.0), harness.generate(SOURCES[4])
    harness.engine.step()
    harness.now = 1.0
    harness.run()
    assert harness.final(late) == Failed("deadline_exceeded")
    assert harness.ids(other) == harness.runner.expected(SOURCES[4], 24)


def test_waiting_ends_at_the_queue_timeout_or_the_deadline() -> None:
    harness = Harness(max_rows=1, queue_timeout_s=5.0)
    running = harness.generate(SOURCES[0], parameters=DecodingParameters(min_new_tokens=23))
    harness.engine.step()
    late, patient = harness.generate(SOURCES[1], deadline=2.0), harness.generate(SOURCES[2])
    harness.engine.step()
    harness.now = 2.0
    harness.engine.step()
    assert harness.final(late) == Failed("deadline_exceeded")
    harness.now = 4.9
    harness.engine.step()
    assert harness.events[patient] == []
    harness.now = 5.0
    harness.engine.step()
    assert harness.final(patient) == Failed("queue_timeout")
    assert harness.events[running] == []


def test_timings_add_up() -> None:
    harness = Harness()

    class Ticking(FakeRunner):
        def encode(self, *arguments: Any) -> Any:
            harness.now += 0.5
            return super().encode(*arguments)

        def step(self, *arguments: Any) -> Any:
            harness.now += 0.25
            return super().step(*arguments)

    harness.engine = Engine(Ticking(fake_manifest(), 4), lambda: harness.now)
    handle, encode = harness.generate(SOURCES[3]), harness.encode(SOURCES[3])
    harness.now += 2.0
    harness.run()
    timings = harness.generated(handle).timings
    assert (timings.queue, timings.encode) == (2000, 500)
    assert timings.decode == 250 * len(harness.ids(handle))
    encoded = harness.final(encode)
    assert isinstance(encoded, Encoded)
    assert (encoded.timings.queue, encoded.timings.encode, encoded.timings.decode) == (2000, 500, 0)


def test_a_source_that_breaks_the_encoder_fails_alone() -> None:
    harness = Harness(faults=Faults(raising_id=40))
    good, bad, encode = harness.generate((5, 6)), harness.generate((5, 40)), harness.encode((7, 8))
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert harness.ids(good) == harness.runner.expected((5, 6), 24)
    assert isinstance(harness.final(encode), Encoded)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    harness = Harness(faults=Faults(nan_id=40))
    parameters = DecodingParameters(do_sample=True)
    bad = [harness.generate((5, 40)), harness.generate((40,), parameters=parameters), harness.encode((40, 5))]
    good = harness.generate((5, 6))
    harness.run()
    assert [harness.final(handle) for handle in bad] == [Failed("internal")] * 3
    assert harness.ids(good) == harness.runner.expected((5, 6), 24)


def test_a_step_that_fails_ends_what_runs_and_the_engine_goes_on() -> None:
    harness = Harness(max_rows=2, faults=Faults(step_calls=frozenset({2})))
    handles = [harness.generate(source) for source in SOURCES[:3]]
    harness.engine.step()
    harness.engine.step()
    assert harness.final(handles[0]) == harness.final(handles[1]) == Failed("internal")
    assert harness.engine.num_running == 0
    harness.run()
    assert harness.ids(handles[2]) == harness.runner.expected(SOURCES[2], 24)


def test_a_seed_that_no_generator_takes_fails_alone() -> None:
    harness = Harness()
    bad = harness.generate(SOURCES[1], parameters=DecodingParameters(do_sample=True, seed=-1))
    good = harness.generate(SOURCES[2])
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert harness.ids(good) == harness.runner.expected(SOURCES[2], 24)


def test_sinks_stop_conditions_and_observers_that_raise_harm_nobody_else() -> None:
    class Broken(NullObserver):
        def on_step(self, rows: int, seconds: float) -> None:
            raise RuntimeError("observer")

    class BrokenStop:
        def update(self, token_id: int) -> bool:
            raise RuntimeError("stop")

    def broken_sink(event: Event) -> None:
        raise RuntimeError("sink")

    harness = Harness(observer=Broken())
    harness.generate(SOURCES[1], sink=broken_sink, stream=True)
    bad = harness.generate(SOURCES[2], stop=BrokenStop())
    good = harness.generate(SOURCES[3])
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert harness.ids(good) == harness.runner.expected(SOURCES[3], 24)


def test_the_observer_hears_of_every_call_and_every_end() -> None:
    seen: list[tuple[Any, ...]] = []

    class Noting(NullObserver):
        def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
            seen.append(("encode", requests, real_tokens, padded_tokens))

        def on_step(self, rows: int, seconds: float) -> None:
            seen.append(("step", rows))

        def on_finish(self, request: Request, event: Event) -> None:
            seen.append(("finish", len(request.source_ids), type(event)))

    harness = Harness(observer=Noting())
    for source in ((5, 6), (5, 6, 7)):
        harness.generate(source, forced_target=(3, 2)[: len(source) - 1])
    harness.run()
    assert seen == [
        ("encode", 2, 5, 6),
        ("step", 2),
        ("finish", 2, Generated),
        ("step", 1),
        ("finish", 3, Generated),
    ]


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        ((), {}, "0 source tokens"),
        ((5,) * 25, {}, "25 source tokens"),
        ((5,), {"forced_target": ()}, "0 target tokens"),
        ((5,), {"forced_target": (5,) * 25}, "25 target tokens"),
        ((5,), {"forced_target": (48, 2)}, "outside the vocabulary"),
        ((5,), {"attention": frozenset({"sideways"})}, "sideways"),
    ],
)
def test_what_the_model_cannot_run_is_refused(source: tuple[int, ...], fields: dict[str, Any], message: str) -> None:
    harness = Harness()
    with pytest.raises(ValueError, match=message):
        harness.generate(source, **fields)
    assert not harness.engine.has_work
