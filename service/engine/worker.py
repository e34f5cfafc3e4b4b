"""The one engine thread, and the bridge between it and asyncio."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from service.engine.engine import Engine
from service.engine.request import Event, Failed, FailureCode, Request, TokenEvent
from service.runtime.memory import trim_heap

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 1.0  # how long a call that is under way may still take when the time to drain is over
JOIN_INTERVAL_S = 0.01
# Seconds between two releases of memory. Each costs a few milliseconds, and the next requests take their pages anew.
RELEASE_INTERVAL_S = 5.0


@dataclass(eq=False)
class RequestFuture:
    """A submitted request as the event loop sees it: its events come in order, and exactly one is the final one."""

    on_event: Callable[[Event], Any]  # called with each event, on the event loop's thread
    give_up: Callable[[], None] | None = None  # tells the engine
    is_done: bool = False

    def cancel(self) -> None:
        """Give the request up: it leaves the queue or its rows before the engine's next step. Again does nothing."""
        if self.give_up is not None and not self.is_done:
            self.give_up()

    def _deliver(self, event: Event) -> None:
        if self.is_done:  # a thread that was given up may still send events
            return
        if not isinstance(event, TokenEvent):
            self.is_done = True
            self.give_up = None  # it holds the engine's request, which holds this future
        self.on_event(event)


class Worker:
    """Steps several engines in turn, in one thread that sleeps while none has work.

    All methods belong to the event loop's thread. Every request ends, whatever becomes of the thread.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)
        # The event loop's side
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._open: set[RequestFuture] = set()
        self._refusal: FailureCode | None = None  # why no request is taken any more
        self.on_close: Callable[[FailureCode], None] = lambda code: None  # called when no request is taken any more
        # The thread's side
        self._outbox: list[tuple[RequestFuture, Event]] = []
        # Between the two
        self._wake = threading.Condition()
        self._is_draining = False  # end when no work is left
        self._is_stopping = False  # end now
        self._has_died = False
        self._step_started: float | None = None
        # The thread's alone
        self._used: set[str] = set()  # models that have worked since their memory was last released
        self._next_release = 0.0

    def start(self) -> None:
        """Start the thread; events will come back to the loop that runs now."""
        self._loop = asyncio.get_running_loop()
        # A daemon: a call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; False before `start`, after `stop` and once it has died."""
        return self._thread is not None and self._thread.is_alive() and not self._has_died

    @property
    def has_died(self) -> bool:
        """True if the thread ended by itself or was given up."""
        return self._has_died

    @property
    def step_seconds(self) -> float:
        """How long the step has taken that runs now; 0 where none does."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def submit(self, model: str, request: Request, on_event: Callable[[Event], Any]) -> RequestFuture:
        """Hand a request to a model's engine; never waits.

        Args:
            model: its name.
            request: for its engine.
            on_event: called with each event on the event loop's thread, perhaps before this method returns.

        Raises:
            KeyError: no model of that name.
        """
        engine = self._engines[model]
        future = RequestFuture(on_event)
        if self._refusal is not None:
            future._deliver(Failed(self._refusal))
            return future
        handle = engine.submit(request, lambda event: self._outbox.append((future, event)))
        self._open.add(future)  # its events come by way of the loop, and so after this
        future.give_up = partial(engine.cancel, handle)
        with self._wake:
            self._wake.notify()
        return future

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, let those in flight finish for so long, fail the rest ("draining"), end the thread.

        Again does nothing, also while the first call waits.
        """
        if self._is_draining:
            return
        self._refusal = self._refusal or "draining"
        await self._join(timeout_s, is_draining=True)
        await self._join(JOIN_TIMEOUT_S, is_stopping=True)
        await asyncio.sleep(0)  # the last events of the thread come first
        self._close("draining")

    async def _join(self, timeout_s: float, *, is_draining: bool = False, is_stopping: bool = False) -> None:
        with self._wake:
            self._is_draining |= is_draining
            self._is_stopping |= is_stopping
            self._wake.notify()
        # Not `Thread.join` in another thread: the interpreter would wait for that one at its end.
        deadline = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(JOIN_INTERVAL_S)

    def give_up(self) -> None:
        """Fail all requests with `engine_dead`, and wait no more for the thread, which hangs in a native call."""
        self._has_died = True
        self._is_stopping = True
        self._close("engine_dead")

    def _deliver(self, events: list[tuple[RequestFuture, Event]]) -> None:
        for future, event in events:
            future._deliver(event)
            if future.is_done:
                self._open.discard(future)

    def _close(self, code: FailureCode) -> None:
        """End every open request, and every later one."""
        self._refusal = self._refusal or code
        self.on_close(code)
        while self._open:
            self._open.pop()._deliver(Failed(code))

    # From here on the engine thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                for name, engine in self._engines.items():
                    if engine.has_work:
                        self._used.add(name)
                        self._step(engine)
                self._release_memory()
        except BaseException:
            logger.exception("the engine thread died")
            self._has_died = True
            self._call_on_loop(self._close, "engine_dead")

    def _wait_for_work(self) -> bool:
        """Sleep until some engine has work or memory is to be released; False when the thread is to end."""
        with self._wake:
            while not self._is_stopping:
                if any(engine.has_work for engine in self._engines.values()):
                    return True
                if self._is_draining:
                    return False
                remaining = self._next_release - time.monotonic() if self._used else None
                if remaining is not None and remaining <= 0:
                    return True
                self._wake.wait(remaining)
            return False

    def _release_memory(self) -> None:
        """Release the memory of the models that have worked and have no work now, once in every interval."""
        now = time.monotonic()
        if now < self._next_release:
            return
        self._next_release = now + RELEASE_INTERVAL_S
        resting = [name for name in self._used if not self._engines[name].has_work]
        self._step_started = now  # it runs a graph, which may hang as a step's does
        for name in resting:
            self._engines[name].release_memory()
        if resting:
            trim_heap()
        self._step_started = None
        self._used.difference_update(resting)

    def _step(self, engine: Engine) -> None:
        self._step_started = time.monotonic()
        try:
            engine.step()
        finally:
            self._step_started = None
            # All events of a step cross in one call: waking the loop costs more than anything else here.
            if self._outbox:
                self._call_on_loop(self._deliver, self._outbox)
                self._outbox = []

    def _call_on_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback, *arguments)
