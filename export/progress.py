"""A progress bar of bytes on a terminal."""

import time
from typing import TextIO

WIDTH = 24  # characters of the bar
INTERVAL_S = 0.1  # between two drawings


class ByteProgress:
    """Shows the share of bytes that were processed, and the remaining time.

    It draws nothing unless the stream is a terminal.
    """

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label, self._total, self._stream = label, total, stream
        self._is_shown = stream.isatty() and total > 0
        self._started = time.monotonic()
        self._done = 0
        self._next_drawing = 0.0

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if self._is_shown and (now >= self._next_drawing or self._done >= self._total):
            self._next_drawing = now + INTERVAL_S
            self._stream.write(f"\r{self._line(now - self._started)}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        """End the line of the bar."""
        if self._is_shown and self._next_drawing:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, seconds: float) -> str:
        share = min(1.0, self._done / self._total)  # a tensor may be read twice
        filled = int(share * WIDTH)
        left = "-:--" if share == 0 else clock(seconds * (1 - share) / share)
        bar = "#" * filled + "." * (WIDTH - filled)
        return f"{self._label} {bar} {100 * share:.0f} % of {self._total / 1e6:.0f} MB, {left} left"


def clock(seconds: float) -> str:
    """Write a duration as `1:02:03`, or `2:03` below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
