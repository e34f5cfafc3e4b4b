"""Control a decoder that runs in its own process. It is suspended between two tasks."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.process import EndedError, JsonWorker

WORKER = "lab.bench.libraries.worker"


@dataclass(frozen=True)
class Task:
    """Sources to decode and how; see `lab.bench.libraries.worker`."""

    sources: Sequence[Sequence[int]]
    num_beams: int = 1
    new_tokens: int | None = None
    at_least_s: float = 0.3


@dataclass(frozen=True)
class TaskResult:
    seconds: float
    outputs: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Setup:
    """A library, its data type, and the options to start it."""

    kind: str  # "sightline", "ctranslate2" or "transformers"
    dtype: str
    model: Path
    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.kind, self.dtype, *self.environment.values()])


class Contender(JsonWorker):
    """A running decoder, created by `running_contenders`."""

    def __init__(self, setup: Setup, num_threads: int) -> None:
        """Start the decoder; `wait_until_ready` raises EndedError if it does not start, for example
        because the processor lacks an instruction set.
        """
        self.setup = setup
        arguments = [WORKER, setup.kind, str(setup.model), "--threads", str(num_threads), *setup.options]
        super().__init__(arguments, os.environ | setup.environment)

    def measure(self, task: Task) -> TaskResult:
        return TaskResult(**self.request(vars(task)))


@contextlib.contextmanager
def running_contenders(setups: Sequence[Setup], num_threads: int) -> Iterator[list[Contender]]:
    """Start the setups that this machine supports, and end them when the block ends."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for setup in setups:
            contender = Contender(setup, num_threads)
            stack.callback(contender.end)
            try:
                contender.wait_until_ready()
            except EndedError:
                print(f"skipped: {setup.name} ended without a response")
                continue
            contenders.append(contender)
        yield contenders
