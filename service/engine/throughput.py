"""Measured speed of one engine, from which the time that waiting work will take is estimated."""

import math

MEMORY_S = 2.0  # a measurement this old counts for 1 / e
LEAST_S = 0.25  # of saturated work, before there is a measurement
FIRST_MEAN_TOKENS = 32.0
MEAN_TOKENS_SHARE = 1 / 16  # of the newest generation in the mean


class Throughput:
    """Units of work per second while sequences wait, and the mean number of tokens of a generation.

    A unit of work is one row in one decoder step, or one sequence in the encoder. Only time during which sequences
    waited is measured: an engine with few rows does fewer units a second than it can. It is written by the engine's
    thread, and read without a lock by any.
    """

    def __init__(self) -> None:
        self.units_per_s: float | None = None  # None until sequences have waited for long enough
        self.mean_tokens = FIRST_MEAN_TOKENS
        self._units = 0.0
        self._seconds = 0.0
        self._saturated_since: float | None = None  # the end of the last turn, if sequences still waited then

    def on_turn(self, units: int, now: float, *, is_saturated: bool) -> None:
        """Note the end of an engine's turn.

        Args:
            units: of work that it did.
            now: its end in seconds.
            is_saturated: True if sequences still wait.
        """
        if self._saturated_since is not None:
            elapsed = now - self._saturated_since
            kept = math.exp(-elapsed / MEMORY_S)
            self._units = self._units * kept + units
            self._seconds = self._seconds * kept + elapsed
            if self._seconds >= LEAST_S:
                self.units_per_s = self._units / self._seconds
        self._saturated_since = now if is_saturated else None

    def on_generated(self, num_tokens: int) -> None:
        """Note a finished generation; `num_tokens` leaves forced tokens out."""
        self.mean_tokens += MEAN_TOKENS_SHARE * (num_tokens - self.mean_tokens)
