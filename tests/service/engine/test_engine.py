from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sightline.service.engine.engine import Engine
from sightline.service.engine.generation import ActiveRequest
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.request import (
    Cancelled,
    Encoded,
    Event,
    Failed,
    Generated,
    GenerateRequest,
    Request,
    TokenEvent,
)
from sightline.service.parameters import FORCED, GenerateParameters
from tests.service.engine.conftest import FAR, SOURCES, CheckedRunner, Harness, StopAfter, StopAtSum, run_alone
from tests.support.fake_runner import FakeRunner, Faults, fake_manifest


def test_greedy_generation_equals_the_model() -> None:
    harness = Harness()
    active = harness.generate(SOURCES[3])
    harness.run()
    assert harness.ids(active) == harness.expected(SOURCES[3])
    assert harness.target(active).finish_reason == "eos"
    assert harness.target(active).tokens[-1].id == 2
    assert (harness.engine.num_running, harness.engine.num_waiting) == (0, 0)


def test_more_requests_than_rows_have_the_results_that_they_have_alone() -> None:
    harness = Harness(max_rows=3)
    handles = [harness.generate(source) for source in SOURCES]
    harness.run()
    assert [harness.ids(active) for active in handles] == [harness.expected(one) for one in SOURCES]


def test_requests_are_counted_while_they_are_encoded() -> None:
    """Regression: requests in the encoder were not counted, so the engine looked idle."""
    seen = []

    class Onlooker(EngineObserver):
        def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
            seen.append((harness.engine.has_work, harness.engine.num_waiting))

    harness = Harness(observer=Onlooker())
    handles = [harness.generate(SOURCES[1]), harness.encode(SOURCES[1])]
    harness.engine.step()
    assert seen == [(True, 2)]
    assert (harness.engine.num_running, harness.engine.num_waiting) == (1, 0)
    harness.run()
    assert all(harness.final(active) for active in handles)


def test_requests_are_counted_once_for_any_number_of_rows() -> None:
    """Regression: rows were counted, so one beam search counted as several requests."""
    harness = Harness()
    harness.search(SOURCES[3], num_beams=3)
    harness.generate(SOURCES[4])
    harness.search(SOURCES[5], num_beams=2)
    harness.engine.step()
    assert (harness.engine.num_running, harness.engine.num_waiting) == (2, 1)


def test_requests_join_between_two_steps() -> None:
    harness = Harness()
    first = harness.generate(SOURCES[1])
    harness.engine.step()
    second = harness.generate(SOURCES[2])
    harness.engine.step()
    assert harness.engine.num_running == 2
    harness.run()
    assert harness.ids(first) == harness.expected(SOURCES[1])
    assert harness.ids(second) == harness.expected(SOURCES[2])


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"parameters": GenerateParameters(max_new_tokens=2)}, "length"), ({"stop": StopAfter(2)}, "stop")],
)
def test_a_text_that_ends_early_has_the_reason(limit: dict[str, Any], reason: str) -> None:
    harness = Harness()
    active = harness.generate(SOURCES[3], **limit)
    harness.run()
    assert harness.ids(active) == harness.expected(SOURCES[3])[:2]
    assert harness.target(active).finish_reason == reason


def test_the_limit_of_the_model_ends_with_length() -> None:
    harness = Harness()
    parameters = GenerateParameters(max_new_tokens=1000, min_new_tokens=1000)
    active = harness.generate(SOURCES[3], parameters=parameters)
    harness.run()
    assert len(harness.ids(active)) == harness.runner.manifest.limits.max_target_tokens
    assert harness.target(active).finish_reason == "length"


def test_min_new_tokens_delays_the_end_token() -> None:
    harness = Harness()
    natural = len(harness.expected(SOURCES[3]))
    active = harness.generate(SOURCES[3], parameters=GenerateParameters(min_new_tokens=natural + 3))
    harness.run()
    assert len(harness.ids(active)) > natural
    assert 2 not in harness.ids(active)[: natural + 3]


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch() -> None:
    parameters = GenerateParameters(do_sample=True, temperature=3.0, top_k=20, top_p=0.95, seed=11)
    alone = Harness()
    lone = alone.generate(SOURCES[5], parameters=parameters)
    alone.run()
    neighbours = Harness()
    for seed, source in enumerate(SOURCES):
        neighbours.generate(source, parameters=GenerateParameters(do_sample=True, seed=seed))
    neighbours.engine.step()
    active = neighbours.generate(SOURCES[5], parameters=parameters)
    neighbours.run()
    assert neighbours.ids(active) == alone.ids(lone)
    assert neighbours.ids(active) != alone.expected(SOURCES[5])


def test_an_encode_request_gets_the_last_layer_without_padding_and_without_a_row() -> None:
    harness = Harness(max_rows=1)
    harness.generate(SOURCES[0], parameters=GenerateParameters(min_new_tokens=20))
    harness.engine.step()
    handles = [harness.encode(source) for source in (SOURCES[2], SOURCES[1])]
    harness.engine.step()
    for active, source in zip(handles, (SOURCES[2], SOURCES[1]), strict=True):
        encoded = harness.final(active)
        assert isinstance(encoded, Encoded)
        np.testing.assert_array_equal(encoded.hidden, np.outer(source, [1, 2, 3, 4]))
    assert harness.engine.num_running == 1


def test_rows_that_return_alternatives_or_read_all_scores_do_not_use_a_shortlist() -> None:
    marked: list[list[bool]] = []

    class Marked(FakeRunner):
        def step(self, *arguments: Any, **options: Any) -> Any:
            marked.append(options["whole"].tolist())
            return super().step(*arguments, **options)

    engine = Engine(Marked(fake_manifest(), 8), lambda: 0.0)
    parameters: list[dict[str, Any]] = [
        {},
        {"top_logprobs": 1},
        {"num_beams": 2},
        {"do_sample": True},
        {"num_beams": 2, "top_logprobs": 1},
    ]
    handles = [
        engine.submit(GenerateRequest("r", SOURCES[4], FAR, GenerateParameters(**fields)), lambda _: None)
        for fields in parameters
    ]
    engine.step()
    engine.step()
    assert marked[-1] == [False, True, False, True, True, False, True]  # the second beams come last
    engine.cancel(handles[0])
    engine.step()
    assert marked[-1] == [True, True, False, True, True, False]  # the last row has moved into the first


def test_only_outputs_that_running_rows_need_are_requested_from_the_runner() -> None:
    asked: list[set[str]] = []

    class Asked(FakeRunner):
        def step(self, *arguments: Any, **options: Any) -> Any:
            asked.append(set(arguments[3]))
            return super().step(*arguments, **options)

    engine = Engine(Asked(fake_manifest(), 4), lambda: 0.0)
    greedy = {"top_ids", "top_logprobs"}
    whole = greedy | {"logits", "logprobs"}

    def ask(**fields: Any) -> set[str]:
        active = engine.submit(GenerateRequest("r", SOURCES[4], FAR, **fields), lambda _: None)
        engine.step()
        engine.cancel(active)
        return asked[-1]

    assert ask() == greedy
    assert ask(attention=frozenset({"encoder"})) == greedy
    assert ask(attention=frozenset({"cross"})) == greedy | {"cross_attention_0", "cross_attention_1"}
    assert ask(parameters=GenerateParameters(min_new_tokens=3, top_logprobs=5)) == greedy
    assert ask(parameters=GenerateParameters(num_beams=3, min_new_tokens=3)) == greedy
    assert ask(parameters=GenerateParameters(do_sample=True)) == whole
    assert ask(target_prefix=(3, 2)) == whole
    for few in ((5,), tuple(range(3, 11))):
        assert ask(parameters=GenerateParameters(suppress_tokens=few)) == greedy
        assert ask(parameters=GenerateParameters(num_beams=2, suppress_tokens=few)) == greedy
    many = tuple(range(3, 20))
    for reads_all in ({"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": many}):
        assert ask(parameters=GenerateParameters(**reads_all)) == whole
        assert ask(parameters=GenerateParameters(num_beams=2, **reads_all)) == whole
    engine.submit(GenerateRequest("r", SOURCES[4], FAR, attention=frozenset({"cross"})), lambda _: None)
    maps = {"cross_attention_0", "cross_attention_1"}
    assert ask(parameters=GenerateParameters(do_sample=True)) == whole | maps


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
    assert harness.ids(waiting) == harness.expected(SOURCES[4])


def test_a_cancelled_request_that_waits_is_never_encoded() -> None:
    runner = FakeRunner(fake_manifest(), 4)
    harness = Harness(runner=runner)
    active = harness.generate(SOURCES[3])
    harness.engine.cancel(active)
    harness.engine.step()
    assert harness.final(active) == Cancelled()
    assert runner.num_encodes == 0
    assert not harness.engine.has_work


def test_a_deadline_ends_a_running_request_and_no_other() -> None:
    harness = Harness()
    late, other = harness.generate(SOURCES[3], deadline=1.0), harness.generate(SOURCES[4])
    harness.engine.step()
    harness.now = 1.0
    harness.run()
    assert harness.final(late) == Failed("deadline_exceeded")
    assert harness.ids(other) == harness.expected(SOURCES[4])


def test_waiting_ends_at_the_deadline_and_not_before() -> None:
    harness = Harness(max_rows=1)
    running = harness.generate(SOURCES[0], parameters=GenerateParameters(min_new_tokens=23))
    harness.engine.step()
    late, patient = harness.generate(SOURCES[1], deadline=2.0), harness.generate(SOURCES[2])
    harness.engine.step()
    harness.now = 2.0
    harness.engine.step()
    assert harness.final(late) == Failed("deadline_exceeded")
    harness.now = 1000.0
    harness.engine.step()
    assert harness.events[patient] == harness.events[running] == []
    harness.run()
    assert harness.ids(patient) == harness.expected(SOURCES[2])


def test_timings_add_up() -> None:
    harness = Harness()

    class Ticking(FakeRunner):
        def run_encoder(self, *arguments: Any) -> Any:
            harness.now += 0.5
            return super().run_encoder(*arguments)

        def step(self, *arguments: Any, **options: Any) -> Any:
            harness.now += 0.25
            return super().step(*arguments, **options)

    harness.engine = Engine(Ticking(fake_manifest(), 4), lambda: harness.now)
    active, encode = harness.generate(SOURCES[3]), harness.encode(SOURCES[3])
    harness.now += 2.0
    harness.run()
    timings = harness.generated(active).timings
    assert (timings.queue, timings.encode) == (2000, 500)
    assert timings.decode == 250 * len(harness.ids(active))
    encoded = harness.final(encode)
    assert isinstance(encoded, Encoded)
    assert (encoded.timings.queue, encoded.timings.encode, encoded.timings.decode) == (2000, 500, 0)


def test_the_observer_is_notified_of_every_call_and_every_end() -> None:
    seen: list[tuple[Any, ...]] = []

    class Noting(EngineObserver):
        def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
            seen.append(("encode", requests, real_tokens, padded_tokens))

        def on_step(self, rows: int, seconds: float) -> None:
            seen.append(("step", rows))

        def on_finish(self, request: Request, event: Event) -> None:
            assert isinstance(request, GenerateRequest)
            seen.append(("finish", len(request.source_ids), type(event)))

    harness = Harness(observer=Noting())
    for source in ((5, 6), (5, 6, 7)):
        harness.generate(source, parameters=GenerateParameters(max_new_tokens=len(source) - 1))
    harness.run()
    assert seen == [("encode", 2, 5, 6), ("step", 2), ("finish", 2, Generated), ("step", 1), ("finish", 3, Generated)]


def test_requests_at_the_limits_of_the_model_are_accepted() -> None:
    harness = Harness()
    harness.generate((5,) * 24, target_prefix=(5,) * 23)
    harness.generate((5,), target_prefix=(47,) * 24, parameters=FORCED)
    harness.search((5,), num_beams=4)
    handles = list(harness.events)
    harness.run()
    assert [len(harness.generated(active).targets) for active in handles] == [1, 1, 4]


def test_a_small_call_gets_more_steps_than_a_large_one_and_the_same_result_as_alone() -> None:
    """Regression: a single input was twelve times slower beside a large call than alone."""
    harness = Harness(runner=CheckedRunner(max_rows=32))
    long = GenerateParameters(num_beams=4, min_new_tokens=20)
    large = [harness.submit(GenerateRequest("large", source, FAR, long)) for source in SOURCES[:7]]
    harness.engine.step()
    small = harness.submit(
        GenerateRequest("small", SOURCES[7], FAR, attention=frozenset({"cross", "decoder"}), stream=True)
    )
    steps = 0
    while not any(isinstance(event, Generated) for event in harness.events[small]):
        harness.engine.step()
        steps += 1
    num_tokens = len(harness.ids(small))
    assert num_tokens > 8
    assert steps <= num_tokens // 4 + 1
    harness.run()
    for active in (*large, small):
        assert isinstance(active.request, GenerateRequest)
        alone = run_alone(active.request, harness.runner.manifest)
        assert [target.tokens for target in harness.generated(active).targets] == [
            target.tokens for target in alone.targets
        ]
    assert isinstance(small.request, GenerateRequest)
    expected = run_alone(small.request, harness.runner.manifest).targets[0]
    for kind, maps in expected.attention.items():
        np.testing.assert_array_equal(harness.target(small).attention[kind], maps)
    assert sum(isinstance(event, TokenEvent) for event in harness.events[small]) == num_tokens


@pytest.mark.parametrize(("num_small", "most_steps"), [(1, 2), (6, 5)])
def test_small_calls_are_stepped_in_proportion_to_all_rows(num_small: int, most_steps: int) -> None:
    """A step of four times as many rows takes four times as long."""
    harness = Harness(runner=CheckedRunner(max_rows=128))
    long = GenerateParameters(num_beams=4, min_new_tokens=20)
    for source in SOURCES[:7] * 4:
        harness.submit(GenerateRequest("large", source, FAR, long))
    harness.engine.step()
    exactly = GenerateParameters(max_new_tokens=15, min_new_tokens=15)
    small = [harness.submit(GenerateRequest(f"{index}", SOURCES[7], FAR, exactly)) for index in range(num_small)]
    for _ in range(most_steps):
        harness.engine.step()
    assert all(isinstance(harness.events[one][-1], Generated) for one in small)
    assert len(set(map(tuple, map(harness.ids, small)))) == 1


def test_calls_of_one_row_each_take_a_step_at_a_time() -> None:
    harness = Harness(runner=CheckedRunner(max_rows=32))
    handles = [harness.submit(GenerateRequest(f"call {index}", one, FAR)) for index, one in enumerate(SOURCES)]
    harness.engine.step()
    runner = harness.runner
    assert isinstance(runner, CheckedRunner)
    assert len(runner.stepped) == len(handles)


def test_a_step_of_a_small_call_that_fails_is_repeated_with_the_others() -> None:
    runner = CheckedRunner(max_rows=32, faults=Faults(step_calls=frozenset({3})))
    harness = Harness(runner=runner)
    long = GenerateParameters(num_beams=4, min_new_tokens=20)
    large = harness.submit(GenerateRequest("large", SOURCES[0], FAR, long))
    small = harness.submit(GenerateRequest("small", SOURCES[7], FAR))
    harness.run()
    assert runner.inner.num_steps > 3
    assert harness.ids(small) == harness.expected(SOURCES[7])
    assert isinstance(large.request, GenerateRequest)
    assert harness.generated(large).targets == run_alone(large.request, runner.manifest).targets


def run_one_by_one(alone_s: float, faults: Faults, fields: dict[str, Any]) -> tuple[int, list[list[Event]]]:
    """Return the number of steps of the engine and the events of the requests."""
    harness = Harness(runner=CheckedRunner(4, faults=faults), alone_s=alone_s)
    num_steps = 0
    for source in SOURCES[:5]:
        stop = {"stop": fields["stop"].copy()} if "stop" in fields else {}
        harness.generate(source, **{**fields, **stop})
        while harness.engine.has_work:
            harness.engine.step()
            num_steps += 1
    return num_steps, list(harness.events.values())


PLAIN: list[dict[str, Any]] = [
    {},
    {"parameters": GenerateParameters(min_new_tokens=9)},
    {"parameters": GenerateParameters(max_new_tokens=4)},
    {"parameters": GenerateParameters(suppress_tokens=(9, 20))},
    {"target_prefix": (7, 8)},
]
OTHERS: list[dict[str, Any]] = [  # need more than the token of each step
    {"parameters": FORCED, "target_prefix": (7, 8, 9)},
    {"parameters": GenerateParameters(top_logprobs=2)},
    {"parameters": GenerateParameters(repetition_penalty=1.5)},
    {"parameters": GenerateParameters(do_sample=True, seed=3)},
    {"stop": StopAtSum(60)},
    {"stream": True},
]


@pytest.mark.parametrize("faults", [Faults(), Faults(step_calls=frozenset({3, 9}))], ids=["", "failed steps"])
@pytest.mark.parametrize("fields", [*PLAIN, *OTHERS])
def test_a_row_alone_takes_several_steps_at_a_time_with_the_same_events(fields: dict[str, Any], faults: Faults) -> None:
    num_single, expected = run_one_by_one(0.0, faults, fields)
    num_steps, events = run_one_by_one(1.0, faults, fields)
    assert events == expected
    assert (num_steps < num_single) == (fields in PLAIN)


def test_steps_of_a_row_alone_end_when_something_else_is_to_do() -> None:
    class Interrupted(FakeRunner):
        interrupt: Callable[[], Any]

        def step(self, *arguments: Any, **options: Any) -> Any:
            self.interrupt()
            return super().step(*arguments, **options)

    runner = Interrupted(fake_manifest(), 4)
    harness, handles = Harness(runner=runner, alone_s=1.0), list[ActiveRequest]()

    def steps_after(interrupt: Callable[[], Any]) -> int:
        handles.append(harness.generate(SOURCES[7]))
        before, runner.interrupt = runner.num_steps, interrupt
        harness.engine.step()
        runner.interrupt = lambda: None
        num_steps = runner.num_steps - before
        harness.run()
        return num_steps

    assert steps_after(lambda: None) == len(harness.expected(SOURCES[7])) > 4
    assert steps_after(lambda: handles.append(harness.generate(SOURCES[1]))) == 1
    assert steps_after(lambda: harness.engine.cancel(handles[-1])) == 1
    assert harness.final(handles[-1]) == Cancelled()
    assert steps_after(lambda: setattr(harness, "now", harness.now + 0.4)) == 3  # `alone_s` is over


def test_a_caller_with_one_row_is_hardly_slowed_down_by_the_rows_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second for each of its rows."""
    source = SOURCES[1]

    def seconds(caller: str, other: str) -> float:
        harness = Harness(max_rows=32)
        step = harness.runner.step

        def timed(token_ids: Any, *arguments: Any, **named: Any) -> Any:
            harness.now += len(token_ids)
            return step(token_ids, *arguments, **named)

        monkeypatch.setattr(harness.runner, "step", timed)
        for number in range(20):
            harness.submit(GenerateRequest(str(number), source, FAR, caller=other))
        harness.engine.step()
        started = harness.now
        one = harness.submit(GenerateRequest("one", source, FAR, caller=caller))
        while not one.has_ended:
            harness.engine.step()
        return harness.now - started

    alone = len(run_alone(GenerateRequest("one", source, FAR), fake_manifest()).targets[0].tokens)
    assert seconds("", "") == seconds("a", "a") > 8 * alone
    assert seconds("a", "b") <= alone + 21  # after one step over all rows
