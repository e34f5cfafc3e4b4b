"""Progress of a training run: a bar on a terminal, otherwise a line every few seconds."""

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from tqdm import tqdm

INTERVAL_S = 5.0  # between two lines
MEASURED_STEPS = 5  # updates before the time of the run is estimated; the first is slower and not counted


@dataclass(frozen=True)
class UpdateFacts:
    """Facts of an update."""

    epoch: int
    step: int  # number of the update in the run
    loss: float  # mean loss of the epoch so far, in nats
    rate: float  # learning rate
    tokens: int  # tokens of the batches, without padding
    seconds_left: float | None  # of the whole run; None before it is known


class Display:
    """Writes messages and progress to a stream, on a terminal with a bar for each epoch."""

    def __init__(self, max_epochs: int, stream: TextIO | None = None) -> None:
        self._max_epochs = max_epochs
        self._stream = sys.stderr if stream is None else stream
        self._bar: Any = None
        self._tokens = 0
        self._since = self._next_line = time.monotonic()

    def line(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()

    def start_epoch(self, epoch: int, num_steps: int, done: int) -> None:
        """Show a bar for an epoch of `num_steps` updates, of which `done` were made earlier."""
        self._tokens, self._since = 0, time.monotonic()
        self._next_line = self._since + INTERVAL_S
        if self._stream.isatty():
            name = f"epoch {epoch} of {self._max_epochs}"
            self._bar = tqdm(total=num_steps, initial=done, desc=name, unit="step", leave=False, file=self._stream)

    def update(self, step: UpdateFacts) -> None:
        self._tokens += step.tokens
        now = time.monotonic()
        speed = f"{self._tokens / max(now - self._since, 1e-9):,.0f} tokens/s"
        left = "" if step.seconds_left is None else f", {duration(step.seconds_left)} left"
        facts = f"loss {step.loss:.3f}, rate {step.rate:.1e}, {speed}{left}"
        if self._bar is not None:
            self._bar.set_postfix_str(facts, refresh=False)
            self._bar.update()
        elif now >= self._next_line:
            self._tokens, self._since, self._next_line = 0, now, now + INTERVAL_S
            self.line(f"epoch {step.epoch} of {self._max_epochs}, step {step.step:,}: {facts}")

    def end_epoch(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Estimate:
    """Estimates the time that is left from the updates and validations of this process."""

    def __init__(self) -> None:
        self.validation_seconds = 0.0  # of the last validation
        self._steps = -1  # the first update is not counted
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count an update."""
        self._steps += 1
        if self._steps > 0:
            self._seconds += seconds

    @property
    def step_seconds(self) -> float | None:
        """Mean time of an update; None before some were measured."""
        return self._seconds / self._steps if self._steps >= MEASURED_STEPS else None

    @property
    def is_first(self) -> bool:
        """True after the update with which the estimate starts."""
        return self._steps == MEASURED_STEPS

    def seconds_left(self, steps: int, validations: float, limit: float | None) -> float | None:
        """Return the time that a number of updates and validations take, at most `limit`."""
        if self.step_seconds is None:
            return None
        seconds = max(steps, 0) * self.step_seconds + max(validations, 0) * self.validation_seconds
        return seconds if limit is None else min(seconds, max(limit, 0.0))


def duration(seconds: float) -> str:
    """Write a duration for a reader: `40 s`, `12 min` or `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def minutes(seconds: float) -> str:
    """Write an expected duration in minutes: `less than 1 minute`, `1 minute` or `90 minutes`."""
    return plural(round(seconds / 60), "minute") if seconds >= 60 else "less than 1 minute"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def peak_memory(device: torch.device) -> float:
    """Return the largest memory of the process so far, in bytes; on a GPU, of its tensors."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
