"""A progress bar on a terminal."""

import time
from typing import TextIO

WIDTH = 24  # characters of the bar
INTERVAL_S = 0.1  # between two drawings


class ProgressBar:
    """Shows finished lines, their rate and the remaining time.

    It draws nothing unless the stream is a terminal.
    """

    def __init__(self, total: int, done: int, stream: TextIO) -> None:
        """Create a bar of `total` lines, of which `done` were finished by earlier runs."""
        self._total, self._first, self._stream = total, done, stream
        self._is_shown = stream.isatty() and total > 0
        self._started = time.monotonic()
        self._next_drawing = 0.0

    def update(self, done: int) -> None:
        now = time.monotonic()
        if self._is_shown and (now >= self._next_drawing or done == self._total):
            self._next_drawing = now + INTERVAL_S
            self._stream.write(f"\r{self._line(done, now - self._started)}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        """End the line of the bar."""
        if self._is_shown and self._next_drawing:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, done: int, seconds: float) -> str:
        share = done / self._total
        filled = int(share * WIDTH)
        rate = (done - self._first) / seconds if seconds > 0 else 0.0
        remaining = clock((self._total - done) / rate) if rate > 0 else "-:--"
        bar = "#" * filled + "." * (WIDTH - filled)
        return f"{bar} {done}/{self._total} lines, {100 * share:.0f} %, {rate:.0f} lines/s, {remaining} left"


def clock(seconds: float) -> str:
    """Write a duration as `1:02:03`, or `2:03` below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
