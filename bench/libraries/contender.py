"""A decoder in a process of its own, as the measuring process sees it. Between two tasks it is held."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.process import Answering, EndedError

WORKER = "bench.libraries.worker"


@dataclass(frozen=True)
class Task:
    """What to decode, see `bench.libraries.worker`."""

    sources: Sequence[Sequence[int]]
    num_beams: int = 1
    new_tokens: int | None = None
    at_least_s: float = 0.3


@dataclass(frozen=True)
class Answer:
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
    """A library, its type of numbers and how it is started."""

    kind: str  # "sightline", "ctranslate2" or "transformers"
    dtype: str
    model: Path
    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.kind, self.dtype, *self.environment.values()])


class Contender:
    """A running decoder. Made by `contending`."""

    def __init__(self, setup: Setup, num_threads: int) -> None:
        self.setup = setup
        arguments = [WORKER, setup.kind, str(setup.model), "--threads", str(num_threads), *setup.options]
        self._process = Answering(arguments, os.environ | setup.environment)

    def wait_until_ready(self) -> None:
        """Raises EndedError where it does not start, as one for an instruction set that the processor lacks."""
        self._process.wait_until_ready()

    def measure(self, task: Task) -> Answer:
        return Answer(**self._process.ask(vars(task)))

    def end(self) -> None:
        self._process.end()


@contextlib.contextmanager
def contending(setups: Sequence[Setup], num_threads: int) -> Iterator[list[Contender]]:
    """Start those of the setups that run on this machine, and end them with the block."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for setup in setups:
            contender = Contender(setup, num_threads)
            stack.callback(contender.end)
            try:
                contender.wait_until_ready()
            except EndedError:
                print(f"left out: {setup.name} ended without an answer")
                continue
            contenders.append(contender)
        yield contenders
