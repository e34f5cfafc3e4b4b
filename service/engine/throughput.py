"""Measured speed of an engine, used to estimate waiting times."""

import math

DECAY_S = 2.0  # time constant of the exponential decay of measurements
MIN_MEASURED_S = 0.25  # duration of saturated work before there is an estimate
FIRST_MEAN_TOKENS = 32.0
MEAN_TOKENS_SHARE = 1 / 16  # weight of the newest generation in the moving average


class Throughput:
    """Units of work per second of a saturated engine, and the mean length of generations.

    A unit of work is one row in one decoder step, or one sequence in the encoder. Only periods in
    which sequences wait are measured, because an engine with few rows is slower than it could be.
    The engine's thread writes the values; any thread can read them without a lock.
    """

    def __init__(self) -> None:
        self.units_per_s: float | None = None  # None until enough saturated work was measured
        self.mean_tokens = FIRST_MEAN_TOKENS
        self._units = 0.0
        self._seconds = 0.0
        self._saturated_since: float | None = None  # end of the last iteration, if sequences were waiting

    def on_turn(self, units: int, now: float, *, is_saturated: bool) -> None:
        """Record an iteration that ended at `now` (s); it is saturated if sequences still wait."""
        if self._saturated_since is not None:
            elapsed = now - self._saturated_since
            kept = math.exp(-elapsed / DECAY_S)
            self._units = self._units * kept + units
            self._seconds = self._seconds * kept + elapsed
            # While all rows compute long prompts, there is none.
            if self._units and self._seconds >= MIN_MEASURED_S:
                self.units_per_s = self._units / self._seconds
        self._saturated_since = now if is_saturated else None

    def on_generated(self, num_tokens: int) -> None:
        """Record the number of generated tokens of a finished generation, without its prefix."""
        self.mean_tokens += MEAN_TOKENS_SHARE * (num_tokens - self.mean_tokens)
