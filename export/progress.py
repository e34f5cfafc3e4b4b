"""Progress bars on a terminal."""

import time
from abc import ABC, abstractmethod
from typing import TextIO

WIDTH = 24  # characters of the bar
INTERVAL_S = 0.1  # between two drawings


class TerminalProgress(ABC):
    """Draws one line that is updated in place. It draws nothing unless the stream is a terminal."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream = total, stream
        self._is_shown = stream.isatty() and total > 0
        self._started = time.monotonic()
        self._next_drawing = 0.0

    def update(self, done: int) -> None:
        """Draw the line for `done` of the total, unless it was drawn just before."""
        now = time.monotonic()
        if self._is_shown and (now >= self._next_drawing or done >= self._total):
            self._next_drawing = now + INTERVAL_S
            self._stream.write(f"\r{self._line(done, now - self._started)}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        """End the line."""
        if self._is_shown and self._next_drawing:
            self._stream.write("\n")
            self._stream.flush()

    @abstractmethod
    def _line(self, done: int, seconds: float) -> str:
        """Return the line after a number of seconds."""


class ByteProgress(TerminalProgress):
    """Shows the share of bytes that were processed, and the remaining time."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        super().__init__(total, stream)
        self._label, self._done = label, 0

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        self.update(self._done)

    def _line(self, done: int, seconds: float) -> str:
        share = min(1.0, done / self._total)  # a tensor may be read twice
        left = "-:--" if share == 0 else clock(seconds * (1 - share) / share)
        return f"{self._label} {bar(share)} {100 * share:.0f} % of {self._total / 1e6:.0f} MB, {left} left"


class LineProgress(TerminalProgress):
    """Shows the number of finished lines, their rate and the remaining time."""

    def __init__(self, total: int, done: int, stream: TextIO) -> None:
        """Create a bar of `total` lines, of which `done` were finished by earlier runs."""
        super().__init__(total, stream)
        self._first = done

    def _line(self, done: int, seconds: float) -> str:
        share = done / self._total
        rate = (done - self._first) / seconds if seconds > 0 else 0.0
        left = clock((self._total - done) / rate) if rate > 0 else "-:--"
        return f"{bar(share)} {done}/{self._total} lines, {100 * share:.0f} %, {rate:.0f} lines/s, {left} left"


def bar(share: float) -> str:
    filled = int(share * WIDTH)
    return "#" * filled + "." * (WIDTH - filled)


def clock(seconds: float) -> str:
    """Write a duration as `1:02:03`, or `2:03` below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
