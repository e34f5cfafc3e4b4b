"""SIGINT and SIGTERM end a run after the current update."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from sightline.base.errors import Interrupted


class Interrupts:
    """Context in which SIGINT and SIGTERM set `received` instead of ending the process.

    A second signal ends the process. Signals that the process ignores stay ignored. Outside of the
    main thread, the context does nothing, because only the main thread can handle signals.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the signal; 0 before it arrives
        self._raises = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Context in which a signal raises Interrupted at once, for work that may be repeated."""
        self._raises = True
        try:
            if self.received:
                raise Interrupted(self.received)
            yield
        finally:
            self._raises = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self.__exit__()
            signal.raise_signal(number)
            return
        self.received = number
        if self._raises:
            raise Interrupted(number)
