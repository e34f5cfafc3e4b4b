import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sightline.service.engine.engine import WAIT_STEPS, Engine
from sightline.service.engine.request import (
    Cancelled,
    Encoded,
    EncodeRequest,
    Event,
    Failed,
    Generated,
    GenerateRequest,
    Request,
    TokenEvent,
)
from sightline.service.engine.worker import Worker
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import Array, Int64
from sightline.service.runtime.thread_counts import Activity
from tests.service.conftest import until
from tests.service.engine.conftest import ids_of, run_alone
from tests.support.fake_runner import FakeRunner, Faults, fake_manifest

pytestmark = pytest.mark.anyio
FAR = 1e12
SOURCE = (5, 6, 7)
LONG = GenerateParameters(min_new_tokens=24)


def runner_of(max_rows: int = 4, **settings: Any) -> FakeRunner:
    return FakeRunner(fake_manifest(), max_rows, **settings)


@asynccontextmanager
async def running(*runners: FakeRunner) -> AsyncIterator[Worker]:
    """Yield a worker with models m0, m1, ... and stop it at the end."""
    worker = Worker({f"m{index}": Engine(runner) for index, runner in enumerate(runners)})
    worker.start()
    try:
        yield worker
    finally:
        await worker.stop(timeout_s=5)


def request(source: tuple[int, ...] = SOURCE, **fields: Any) -> GenerateRequest:
    return GenerateRequest("r", source, FAR, **fields)


class EventCollector:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._final: Event | None = None
        self.cancel: Callable[[], None] = lambda: None

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)

    def __aiter__(self) -> "EventCollector":
        return self

    async def __anext__(self) -> Event:
        if self._final is not None:
            assert self._events.empty(), "no event follows the final one"
            raise StopAsyncIteration
        event = await self._events.get()
        if not isinstance(event, TokenEvent):
            self._final = event
        return event

    async def result(self) -> Event:
        async for _ in self:
            pass
        assert self._final is not None
        return self._final


def submit(worker: Worker, model: str, request: Request) -> EventCollector:
    collector = EventCollector()
    collector.cancel = worker.submit(model, request, collector.put).cancel
    return collector


async def test_a_single_request_gets_its_result() -> None:
    runner = runner_of()
    async with running(runner) as worker:
        final = await submit(worker, "m0", request()).result()
        assert isinstance(final, Generated)
        assert ids_of(final.targets[0]) == runner.expected(SOURCE, 24)
        assert isinstance(await submit(worker, "m0", EncodeRequest("e", SOURCE, FAR)).result(), Encoded)


async def test_others_are_told_while_there_is_work() -> None:
    class Noting(Activity):
        def __init__(self) -> None:
            self.noted = [False]

        def set_busy(self, is_busy: bool) -> None:
            if is_busy is not self.noted[-1]:
                self.noted.append(is_busy)

        def is_alone(self) -> bool:
            return False

    activity = Noting()
    worker = Worker({"m0": Engine(runner_of())}, activity)
    worker.start()
    for _ in range(2):
        await submit(worker, "m0", request()).result()
        while activity.noted[-1]:
            await asyncio.sleep(0.001)
    await worker.stop(timeout_s=5)
    assert activity.noted == [False, True, False, True, False]


async def test_tokens_stream_in_order_and_the_result_comes_last() -> None:
    async with running(runner_of()) as worker:
        collector = submit(worker, "m0", request(stream=True))
        *tokens, final = [event async for event in collector]
        assert isinstance(final, Generated)
        (target,) = final.targets
        assert [event.token for event in tokens if isinstance(event, TokenEvent)] == list(target.tokens)
        assert len(tokens) == len(target.tokens)
        assert await collector.result() is final
        assert [event async for event in collector] == []


async def test_tokens_arrive_during_the_generation() -> None:
    async with running(runner_of(step_s=0.01)) as worker:
        collector = submit(worker, "m0", request(stream=True, parameters=LONG))
        assert isinstance(await anext(collector), TokenEvent)
        collector.cancel()
        assert await collector.result() == Cancelled()


async def test_many_requests_to_two_models_get_correct_results() -> None:
    runners = runner_of(max_rows=2), runner_of(max_rows=3)
    async with running(*runners) as worker:
        sources = [(3 + index, 5, 6) for index in range(20)]
        collectors = [submit(worker, f"m{index % 2}", request(source)) for index, source in enumerate(sources)]
        for source, collector in zip(sources, collectors, strict=True):
            final = await collector.result()
            assert isinstance(final, Generated)
            assert ids_of(final.targets[0]) == runners[0].expected(source, 24)


async def test_an_idle_worker_sleeps_and_wakes_for_each_request() -> None:
    runner = runner_of()
    async with running(runner) as worker:
        for _ in range(3):
            await submit(worker, "m0", request()).result()
            steps = runner.num_steps
            await asyncio.sleep(0.02)
            assert runner.num_steps == steps


async def test_cancelling_twice_or_after_the_end_does_nothing() -> None:
    async with running(runner_of(step_s=0.005)) as worker:
        collector = submit(worker, "m0", request(parameters=LONG))
        collector.cancel()
        collector.cancel()
        assert await collector.result() == Cancelled()
        collector.cancel()
        done = submit(worker, "m0", request())
        assert isinstance(await done.result(), Generated)
        done.cancel()
        assert isinstance(await submit(worker, "m0", request()).result(), Generated)


async def test_requests_that_no_model_can_run_are_rejected_on_submission() -> None:
    async with running(runner_of()) as worker:
        with pytest.raises(KeyError):
            submit(worker, "m9", request())
        assert await submit(worker, "m0", request(())).result() == Failed("internal")
        assert worker.is_alive


async def test_a_disconnected_client_does_not_affect_others() -> None:
    async with running(runner_of(step_s=0.002)) as worker:

        async def leave_early() -> None:
            async for _ in submit(worker, "m0", request(stream=True, parameters=LONG)):
                await asyncio.sleep(60)

        task = asyncio.create_task(leave_early())
        await asyncio.sleep(0.01)
        task.cancel()
        assert isinstance(await submit(worker, "m0", request()).result(), Generated)
        assert worker.is_alive


def test_results_for_a_loop_that_is_closed_do_not_kill_the_thread() -> None:
    runner = runner_of(step_s=0.005)
    worker = Worker({"m0": Engine(runner)})

    async def leave() -> None:
        worker.start()
        submit(worker, "m0", request(stream=True, parameters=LONG))

    asyncio.run(leave())
    for _ in range(1000):  # not `has_work`: seen from here it is false for a moment while a request is encoded
        if runner.num_steps == 24:
            break
        threading.Event().wait(0.005)
    assert runner.num_steps == 24
    assert worker.is_alive
    asyncio.run(worker.stop(timeout_s=5))
    assert not worker.is_alive


async def test_stopping_finishes_running_requests_and_rejects_new_ones() -> None:
    async with running(runner_of(max_rows=1, step_s=0.002)) as worker:
        collectors = [submit(worker, "m0", request(parameters=LONG)) for _ in range(3)]
        stopping = asyncio.create_task(worker.stop(timeout_s=5))
        await asyncio.sleep(0)
        assert await submit(worker, "m0", request()).result() == Failed("draining")
        await stopping
        assert not worker.is_alive
        for collector in collectors:
            assert isinstance(await collector.result(), Generated)


async def test_stopping_fails_requests_that_take_too_long() -> None:
    async with running(runner_of(max_rows=1, step_s=0.02)) as worker:
        collectors = [submit(worker, "m0", request(parameters=LONG)) for _ in range(3)]
        await worker.stop(timeout_s=0.1)
        assert [await collector.result() for collector in collectors] == [Failed("draining")] * 3
        assert not worker.is_alive


async def test_a_second_stop_does_not_wait() -> None:
    async with running(runner_of(max_rows=1, step_s=0.02)) as worker:
        collector = submit(worker, "m0", request(parameters=LONG))
        stopping = asyncio.create_task(worker.stop(timeout_s=5))
        await asyncio.sleep(0)
        await worker.stop(timeout_s=0)
        assert worker.is_alive and not stopping.done()
        await stopping
        assert isinstance(await collector.result(), Generated)


async def test_stopping_does_not_wait_for_a_call_that_hangs() -> None:
    release = threading.Event()
    async with running(runner_of(faults=Faults(hang=release))) as worker:
        collector = submit(worker, "m0", request(stream=True))
        await worker.stop(timeout_s=0.05)
        release.set()
        while worker.is_alive:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # the events of the late step have come
        assert [event async for event in collector] == [Failed("draining")]
        assert await collector.result() == Failed("draining")


async def test_stopping_a_worker_that_never_started_is_harmless() -> None:
    worker = Worker({})
    assert not worker.is_alive
    await worker.stop(timeout_s=1)


async def test_a_dead_thread_fails_every_request_now_and_later() -> None:
    class Deadly(FakeRunner):
        def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
            raise SystemError("not an error that the engine expects")

    runner = Deadly(fake_manifest(), 4)
    async with running(runner) as worker:
        collectors = [submit(worker, "m0", request(parameters=GenerateParameters(max_new_tokens=1)))]
        collectors += [submit(worker, "m0", request(parameters=LONG, stream=True)) for _ in range(2)]
        finals = [await collector.result() for collector in collectors]
        assert finals == [Failed("engine_dead")] * 3
        assert not worker.is_alive
        assert await submit(worker, "m0", request()).result() == Failed("engine_dead")


async def test_a_failing_runner_call_does_not_kill_the_thread() -> None:
    async with running(runner_of(faults=Faults(step_calls=frozenset({1}), raising_id=40))) as worker:
        assert await submit(worker, "m0", request()).result() == Failed("internal")
        assert await submit(worker, "m0", request((40,))).result() == Failed("internal")
        assert isinstance(await submit(worker, "m0", request()).result(), Generated)
        assert worker.is_alive


class Clocked(FakeRunner):
    """A runner whose steps take 0.1 s, and its encoder batches 0.01 s for each token."""

    now = 0.0

    def __init__(self, runs: list[tuple[int, float]]) -> None:
        super().__init__(fake_manifest(), 4)
        self._runs = runs  # size of each encoder batch, 0 for steps, with the time of its end

    def run_encoder(self, source_ids: Int64, *arguments: Any) -> Mapping[str, Array]:
        Clocked.now += 0.01 * source_ids.size
        self._runs.append((len(source_ids), Clocked.now))
        return super().run_encoder(source_ids, *arguments)

    def step(self, *arguments: Any, **options: Any) -> Mapping[str, Array]:
        Clocked.now += 0.1
        self._runs.append((0, Clocked.now))
        return super().step(*arguments, **options)


async def test_batches_are_small_while_rows_wait_and_large_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runs = SimpleNamespace(monotonic=lambda: Clocked.now), list[tuple[int, float]]()
    monkeypatch.setattr("sightline.service.engine.worker.time", clock)
    engines = [Engine(Clocked(runs), clock.monotonic, max_batch_tokens=160) for _ in range(2)]
    worker = Worker({"m0": engines[0], "m1": engines[1]})
    generation = submit(worker, "m1", request(parameters=LONG))
    sources = [tuple(range(3 + n % 7, 11 + n % 7)) for n in range(140)]
    encodes = [submit(worker, "m0", EncodeRequest(str(n), source, FAR)) for n, source in enumerate(sources)]
    worker.start()
    final = await generation.result()
    assert isinstance(final, Generated)
    assert final.targets == run_alone(request(parameters=LONG), fake_manifest()).targets
    for encode, source in zip(encodes, sources, strict=True):
        encoded = await encode.result()
        assert isinstance(encoded, Encoded)
        np.testing.assert_array_equal(encoded.hidden, np.outer(source, [1, 2, 3, 4]))
    await worker.stop(timeout_s=5)
    steps = [now for size, now in runs if not size]
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 0.1 * (WAIT_STEPS + 1) + 1e-6
    during = [size for size, now in runs if size and steps[0] < now < steps[-1]]
    assert 1 < max(during) <= 10 * WAIT_STEPS // 8  # tokens in the time of these steps
    assert [size for size, now in runs if now > steps[-1]][:2] == [20, 20]


class Endless(FakeRunner):
    """A runner whose steps end only if they are terminated."""

    def step(self, *arguments: Any, **options: Any) -> Any:
        self.is_terminated.wait()
        raise RuntimeError("terminated")


async def test_a_terminated_step_fails_its_requests_and_other_models_go_on() -> None:
    async with running(Endless(fake_manifest(), 2), runner_of()) as worker:
        assert await worker.end_step(0.0) is None  # no step runs
        stuck = [submit(worker, "m0", request((5 + n, 6, 7))) for n in range(9)]  # MAX_FAILURES is 8
        await until(lambda: worker.step_started is not None)
        other = submit(worker, "m1", request())
        assert await worker.end_step(5.0) == "m0"
        assert [await one.result() for one in stuck[:2]] == [Failed("internal")] * 2
        assert isinstance(await other.result(), Generated)
        worker.fail_requests("m0", "loading")
        assert [await one.result() for one in stuck[2:]] == [Failed("loading")] * 7
        await worker.remove("m0")
        assert worker.is_alive


async def test_a_step_that_no_termination_ends_is_reported() -> None:
    released = threading.Event()

    class Stuck(FakeRunner):
        def step(self, *arguments: Any, **options: Any) -> Any:
            released.wait()
            raise RuntimeError("late")

    async with running(Stuck(fake_manifest(), 2)) as worker:
        stuck = submit(worker, "m0", request())
        await until(lambda: worker.step_started is not None)
        try:
            assert await worker.end_step(0.05) is None
        finally:
            released.set()
        assert await stuck.result() == Failed("internal")


@pytest.fixture
def releasing_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.service.engine.worker.RELEASE_INTERVAL_S", 0.05)


@pytest.mark.usefixtures("releasing_often")
async def test_a_model_releases_its_memory_after_its_work_and_once() -> None:
    used, unused = runner_of(), runner_of()
    async with running(used, unused) as worker:
        await submit(worker, "m0", request()).result()
        await until(lambda: used.num_releases > 0)
        releases = used.num_releases
        await asyncio.sleep(0.3)
        assert used.num_releases == releases  # none without work
        assert unused.num_releases == 0
        assert isinstance(await submit(worker, "m0", request()).result(), Generated)
        await until(lambda: used.num_releases > releases)


@pytest.mark.usefixtures("releasing_often")
async def test_a_busy_model_keeps_its_memory_while_another_releases_its_own() -> None:
    """Released rows of a FakeRunner contain garbage that would change the text."""
    busy, resting = runner_of(step_s=0.1), runner_of()
    async with running(busy, resting) as worker:
        long = submit(worker, "m0", request())
        await submit(worker, "m1", EncodeRequest("e", SOURCE, FAR)).result()
        await until(lambda: resting.num_releases > 0)
        assert busy.num_releases == 0
        final = await long.result()
        assert isinstance(final, Generated)
        assert ids_of(final.targets[0]) == busy.expected(SOURCE, 24)


@pytest.mark.usefixtures("releasing_often")
async def test_a_failed_release_of_memory_ends_no_request() -> None:
    class Keeping(FakeRunner):
        def release_memory(self) -> None:
            super().release_memory()
            raise RuntimeError("no")

    runner = Keeping(fake_manifest(), 4)
    async with running(runner) as worker:
        await submit(worker, "m0", request()).result()
        await until(lambda: runner.num_releases > 0)
        assert isinstance(await submit(worker, "m0", request()).result(), Generated)
        assert worker.is_alive


async def test_an_engine_can_be_added_and_removed_while_others_run() -> None:
    busy, added = runner_of(step_s=0.005), runner_of()
    async with running(busy) as worker:
        stream = submit(worker, "m0", request(stream=True, parameters=LONG))
        await anext(stream)
        with pytest.raises(KeyError):
            submit(worker, "new", request())
        await worker.add("new", Engine(added))
        final = await submit(worker, "new", request()).result()
        assert isinstance(final, Generated) and ids_of(final.targets[0]) == added.expected(SOURCE, 24)
        await worker.remove("new")
        with pytest.raises(KeyError):
            submit(worker, "new", request())
        others = [event async for event in stream]
        assert isinstance(others[-1], Generated) and len(others) == 24  # 23 tokens, then the result


async def test_requests_of_one_model_can_be_failed_while_others_continue() -> None:
    runners = runner_of(step_s=0.005), runner_of(step_s=0.005)
    async with running(*runners) as worker:
        first, second = (submit(worker, name, request(stream=True, parameters=LONG)) for name in ("m0", "m1"))
        await anext(first)
        worker.fail_requests("m0", "model_not_found")
        assert await first.result() == Failed("model_not_found")
        assert isinstance(await second.result(), Generated)
        await worker.remove("m0")
        await worker.remove("m0")  # does nothing


async def test_memory_is_released_by_an_idle_engine() -> None:
    busy, idle = runner_of(step_s=0.005), runner_of()
    async with running(busy, idle) as worker:
        stream = submit(worker, "m0", request(stream=True, parameters=LONG))
        await anext(stream)
        await worker.release_memory()
        assert (busy.num_releases, idle.num_releases) == (0, 1)
        stream.cancel()


async def test_a_worker_whose_thread_has_ended_does_not_wait_for_commands() -> None:
    async with running(runner_of()) as worker:
        await worker.stop(timeout_s=5)
        await worker.add("new", Engine(runner_of()))
        await worker.release_memory()
