"""What goes wrong in one request harms no other, and is in the log."""

import pytest

from service.engine.engine import MAX_FAILURES, RuntimeFailedError
from service.engine.observer import NullObserver
from service.engine.request import (
    DecodingParameters,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Final,
    GenerateRequest,
)
from service.runtime.fake import Faults
from tests.service.engine.conftest import FAR, SOURCES, Harness, StopAfter


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


def test_a_source_that_breaks_the_encoder_fails_alone() -> None:
    harness = Harness(faults=Faults(raising_id=40))
    good, bad, encode = harness.generate((5, 6)), harness.generate((5, 40)), harness.encode((7, 8))
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert harness.ids(good) == harness.expected((5, 6))
    assert isinstance(harness.final(encode), Encoded)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    harness = Harness(faults=Faults(nan_id=40))
    parameters = DecodingParameters(do_sample=True)
    bad = [harness.generate((5, 40)), harness.generate((40,), parameters=parameters), harness.encode((40, 5))]
    good = harness.generate((5, 6))
    harness.run()
    assert [harness.final(handle) for handle in bad] == [Failed("internal")] * 3
    assert harness.ids(good) == harness.expected((5, 6))


def test_a_step_that_fails_ends_what_runs_and_the_engine_goes_on() -> None:
    harness = Harness(max_rows=2, faults=Faults(step_calls=frozenset({2})))
    handles = [harness.generate(source) for source in SOURCES[:3]]
    harness.engine.step()
    harness.engine.step()
    assert harness.final(handles[0]) == harness.final(handles[1]) == Failed("internal")
    assert harness.engine.num_running == 0
    harness.run()
    assert harness.ids(handles[2]) == harness.expected(SOURCES[2])


def test_a_seed_that_no_generator_takes_fails_alone() -> None:
    harness = Harness()
    bad = harness.generate(SOURCES[1], parameters=DecodingParameters(do_sample=True, seed=-1))
    good = harness.generate(SOURCES[2])
    harness.run()
    assert harness.final(bad) == Failed("internal")
    assert harness.ids(good) == harness.expected(SOURCES[2])


def test_sinks_stop_conditions_and_observers_that_raise_harm_nobody_else() -> None:
    class Broken(NullObserver):
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


ALWAYS, EVERY_OTHER = frozenset(range(1, 100)), frozenset(range(1, 200, 2))


def ask(harness: Harness, call: str, *sources: tuple[int, ...]) -> list[Final]:
    """How the requests of one call end."""
    parameters = DecodingParameters(max_new_tokens=1)
    handles = [harness.submit(GenerateRequest(call, source, FAR, parameters=parameters)) for source in sources]
    harness.run()
    return [harness.final(handle) for handle in handles]


@pytest.mark.parametrize("faults", [Faults(step_calls=ALWAYS), Faults(encode_calls=ALWAYS)], ids=["step", "encoder"])
def test_a_graph_that_fails_whatever_it_is_given_ends_the_engine(faults: Faults) -> None:
    """It stayed ready, and answered every call with 500."""
    harness = Harness(faults=faults)
    for number in range(MAX_FAILURES - 1):
        assert ask(harness, f"call {number}", (5, 6)) == [Failed("internal")]
    with pytest.raises(RuntimeFailedError, match=f"{MAX_FAILURES} runs failed"):
        ask(harness, "one more", (5, 6))


@pytest.mark.parametrize(
    "faults", [Faults(step_calls=EVERY_OTHER), Faults(encode_calls=EVERY_OTHER)], ids=["step", "encoder"]
)
def test_failures_with_a_success_between_them_do_not_add_up(faults: Faults) -> None:
    harness = Harness(faults=faults)
    finals = [ask(harness, f"call {number}", (5, 6)) for number in range(3 * MAX_FAILURES)]
    assert finals.count([Failed("internal")]) == 3 * MAX_FAILURES / 2


def test_one_call_alone_ends_nothing() -> None:
    """One with eight poisoned inputs ended the service of everybody."""
    harness = Harness(max_rows=2, faults=Faults(raising_id=40))
    bad = ask(harness, "poison", *[(5, 40)] * 3 * MAX_FAILURES)
    assert bad == [Failed("internal")] * len(bad)
    good = harness.generate((5, 6))
    harness.run()
    assert harness.ids(good) == harness.expected((5, 6))


def test_one_of_a_batch_that_goes_well_is_no_failure() -> None:
    harness = Harness(faults=Faults(raising_id=40))
    for number in range(2 * MAX_FAILURES):
        assert Failed("internal") in ask(harness, f"call {number}", (5, 40), (5, 6))
