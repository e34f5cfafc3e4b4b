"""A decoder in a process of its own, as the measuring process sees it. Between two tasks it is held."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.process import Process

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


class CannotRunError(Exception):
    """A contender that does not start on this machine, as one for an instruction set that the processor lacks."""


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
        self._process = Process(
            [WORKER, setup.kind, str(setup.model), "--threads", str(num_threads), *setup.options],
            os.environ | setup.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def wait_until_ready(self) -> None:
        """Raises CannotRunError where the worker ends instead."""
        self._read()
        self._process.hold()

    def measure(self, task: Task) -> Answer:
        with self._process.running():
            requests, _ = self._process.pipes
            requests.write(json.dumps(vars(task)) + "\n")
            requests.flush()
            return Answer(**self._read())

    def end(self) -> None:
        self._process.end()

    def _read(self) -> dict[str, Any]:
        _, answers = self._process.pipes
        line = answers.readline()
        if not line:
            raise CannotRunError(f"{self.setup.name} ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


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
            except CannotRunError as error:
                print(f"left out: {error}")
                continue
            contenders.append(contender)
        yield contenders
