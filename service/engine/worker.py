"""The engine thread and its bridge to asyncio."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sightline.service.engine.engine import Engine
from sightline.service.engine.request import Event, Failed, FailureCode, Request, TokenEvent
from sightline.service.engine.scheduler import Turns
from sightline.service.runtime.state_memory import trim_heap
from sightline.service.runtime.thread_counts import Activity

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 1.0  # time that the running step may still take after the drain timeout
COMMAND_INTERVAL_S = 0.01
# Shortest time between the first step of a model after a release of its memory and the next
# release, which waits until the model has no work. A release takes about a millisecond and
# causes later page faults.
RELEASE_INTERVAL_S = 1.0


@dataclass(eq=False)
class RequestFuture:
    """A submitted request on the event loop's side. Its last event is a final one."""

    model: str
    on_event: Callable[[Event], Any]  # called with each event, on the event loop's thread
    cancel_in_engine: Callable[[], None] | None = None  # cancels the request in the engine
    is_done: bool = False

    def cancel(self) -> None:
        """Cancel the request before the engine's next step. Does nothing if it has ended."""
        if self.cancel_in_engine is not None and not self.is_done:
            self.cancel_in_engine()

    def _deliver(self, event: Event) -> None:
        if self.is_done:  # an abandoned engine thread may still send events
            return
        if not isinstance(event, TokenEvent):
            self.is_done = True
            self.cancel_in_engine = None  # it holds the engine's request, which holds this future
        self.on_event(event)


class Worker:
    """Runs several engines in turn, in one thread that sleeps while there is no work.

    All public methods must be called on the event loop's thread. Every request gets a final event,
    even if the engine thread dies or hangs.
    """

    def __init__(self, engines: Mapping[str, Engine], activity: Activity | None = None) -> None:
        """Create a worker whose thread is not started; `activity` tells others that it has work."""
        self._engines = dict(engines)  # after `start`, only the engine thread changes it
        self._activity = activity or Activity()
        # The event loop's side
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._open: set[RequestFuture] = set()
        self._close_code: FailureCode | None = None  # failure code of new requests once the worker is closed
        self._has_ended = asyncio.Event()  # the thread has ended or was abandoned, and its events are delivered
        self.on_close: Callable[[FailureCode], None] = lambda code: None  # called when the worker closes
        # The engine thread's side
        self._outbox: list[tuple[RequestFuture, Event]] = []
        # Shared by both threads
        self._wake = threading.Condition()
        self._is_draining = False  # the thread ends when there is no work
        self._is_stopping = False  # the thread ends after the current step
        self.has_died = False  # the thread ended with an error or was abandoned
        self.step_started: float | None = None  # time of `time.monotonic`, while a step runs
        self._stepped: tuple[str, Engine] | None = None  # the model whose step runs, with its engine
        self._commands: deque[Callable[[], None]] = deque()  # run by the engine thread between two steps
        # Used by the engine thread only
        self._turns = Turns()
        self._release_at: dict[str, float] = {}  # earliest next release of models that ran since the last one

    def start(self) -> None:
        """Start the thread; events are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        # A daemon thread, so that a step that hangs does not prevent the process from exiting.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while the thread runs: after `start`, before `stop`, and if it has not died."""
        return self._thread is not None and not self._has_ended.is_set() and not self.has_died

    async def end_step(self, timeout_s: float) -> str | None:
        """End the running step by terminating its graph; the model must then be removed.

        Returns the name of the model; None if the step does not end in time or is of no model.
        """
        stepped = self._stepped
        if stepped is None:
            return None
        model, engine = stepped
        engine.terminate()
        deadline = time.monotonic() + timeout_s
        while self._stepped is stepped and time.monotonic() < deadline:
            await asyncio.sleep(COMMAND_INTERVAL_S)
        return None if self._stepped is stepped else model

    def submit(self, model: str, request: Request, on_event: Callable[[Event], Any]) -> RequestFuture:
        """Submit a request to a model's engine without waiting.

        `on_event` is called on the event loop's thread; if the worker is closed, it is called
        before this method returns. Raises `KeyError` if there is no such model.
        """
        engine = self._engines[model]
        future = RequestFuture(model, on_event)
        if self._close_code is not None:
            future._deliver(Failed(self._close_code))
            return future
        active = engine.submit(request, lambda event: self._outbox.append((future, event)))
        self._open.add(future)  # events are delivered by the event loop, so not before this line
        future.cancel_in_engine = partial(engine.cancel, active)
        with self._wake:
            self._wake.notify()
        return future

    async def add(self, model: str, engine: Engine) -> None:
        """Add an engine between two steps. Requests may be submitted when this returns."""
        await self._run_between_steps(partial(self._engines.__setitem__, model, engine))

    async def remove(self, model: str) -> None:
        """Remove a model's engine between two steps. It must have no open requests."""

        def run() -> None:
            self._engines.pop(model, None)
            self._release_at.pop(model, None)

        await self._run_between_steps(run)

    async def release_memory(self) -> None:
        """Return unused memory to the system, such as that of an engine that no longer exists."""

        def run() -> None:
            idle = [engine for engine in self._engines.values() if not engine.has_work]
            for engine in idle[:1]:  # all models share the memory arena, which any of them can shrink
                engine.release_memory()
            trim_heap()

        await self._run_between_steps(run)

    def fail_requests(self, model: str, code: FailureCode) -> None:
        for future in [future for future in self._open if future.model == model]:
            future.cancel()
            future._deliver(Failed(code))
            self._open.discard(future)

    async def _run_between_steps(self, command: Callable[[], None]) -> None:
        """Run a function on the engine thread, and wait for it as long as the thread lives."""
        has_run = threading.Event()

        def run() -> None:
            command()
            has_run.set()

        with self._wake:
            self._commands.append(run)
            self._wake.notify()
        while self.is_alive and not has_run.is_set():
            await asyncio.sleep(COMMAND_INTERVAL_S)

    async def stop(self, timeout_s: float) -> None:
        """Reject new requests, wait for requests in progress, and end the thread.

        After the timeout, the remaining requests fail with "draining". Further calls do nothing.
        """
        if self._is_draining:
            return
        self._loop = asyncio.get_running_loop()  # that of `start` may have been closed
        self._close_code = self._close_code or "draining"
        await self._join(timeout_s, is_draining=True)
        await self._join(JOIN_TIMEOUT_S, is_stopping=True)
        self._close("draining")

    async def _join(self, timeout_s: float, *, is_draining: bool = False, is_stopping: bool = False) -> None:
        with self._wake:
            self._is_draining |= is_draining
            self._is_stopping |= is_stopping
            self._wake.notify()
        if self._thread is None:
            return
        # `Thread.join` in a helper thread would delay the interpreter's exit if the engine hangs.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()

    def abandon_thread(self) -> None:
        """Fail all requests with `engine_dead` and abandon the thread, which hangs."""
        self.has_died = True
        self._is_stopping = True
        self._close("engine_dead")
        self._has_ended.set()

    def _deliver(self, events: list[tuple[RequestFuture, Event]]) -> None:
        for future, event in events:
            future._deliver(event)
            if future.is_done:
                self._open.discard(future)

    def _close(self, code: FailureCode) -> None:
        """Fail all open requests, and all that are submitted later."""
        self._close_code = self._close_code or code
        self.on_close(code)
        while self._open:
            self._open.pop()._deliver(Failed(code))

    # Methods of the engine thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                self._step_next()
                self._release_memory()
        except BaseException:
            logger.exception("the engine thread died")
            self.has_died = True
            self._call_on_loop(self._close, "engine_dead")
        finally:
            self._activity.set_busy(False)
            self._call_on_loop(self._has_ended.set)

    def _run_commands(self) -> None:
        while self._commands:
            self.step_started = time.monotonic()  # a release of memory runs a graph, which may hang like a step
            self._commands.popleft()()
            self.step_started = None

    def _step_next(self) -> None:
        """Run a step of the engine whose turn it is; its batch is small while rows of others wait.

        This is a method, because its local variables must not keep an engine that is removed.
        """
        working = {name: engine for name, engine in self._engines.items() if engine.has_work}
        if not working:
            return
        waits = {name: engine.max_wait_s for name, engine in working.items()}
        name, limit_s = self._turns.next(waits, time.monotonic())
        self._release_at.setdefault(name, time.monotonic() + RELEASE_INTERVAL_S)
        self._stepped = name, working[name]
        self._step(working[name], limit_s)
        self._stepped = None
        self._turns.end(time.monotonic())

    def _wait_for_work(self) -> bool:
        """Sleep until there is work or memory to release; return False to end the thread."""
        with self._wake:
            while not self._is_stopping:
                if self._commands or any(engine.has_work for engine in self._engines.values()):
                    self._activity.set_busy(True)
                    return True
                self._activity.set_busy(False)
                if self._is_draining:
                    return False
                remaining = min(self._release_at.values(), default=math.inf) - time.monotonic()
                if remaining <= 0:
                    return True
                self._wake.wait(None if remaining == math.inf else remaining)
            return False

    def _release_memory(self) -> None:
        """Release the memory of models that have no work now and whose time has come."""
        now = time.monotonic()
        idle = [name for name, due in self._release_at.items() if due <= now and not self._engines[name].has_work]
        if not idle:
            return
        self.step_started = now  # a release runs a graph, which may hang like a step
        for name in idle:
            self._engines[name].release_memory()
            del self._release_at[name]
        trim_heap()
        self.step_started = None

    def _step(self, engine: Engine, limit_s: float) -> None:
        self.step_started = time.monotonic()
        try:
            engine.step(limit_s)
        finally:
            self.step_started = None
            # Deliver all events of a step in one call, because waking the event loop is expensive.
            if self._outbox:
                self._call_on_loop(self._deliver, self._outbox)
                self._outbox = []

    def _call_on_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)
