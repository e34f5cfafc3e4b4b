"""Processes that take turns: while one is measured, those that are held do not run at all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

END_TIMEOUT_S = 20


class Process:
    """A Python module run in a process group of its own, its children with it."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
    ) -> None:
        """`arguments` come after `python -m`; `environment` is the whole one, `folder` where it runs."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=dict(environment),
            cwd=folder,
            stdin=stdin,
            stdout=stdout,
            start_new_session=True,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pipes(self) -> tuple[IO[str], IO[str]]:
        """What it reads and what it writes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def hold(self) -> None:
        """Stop running, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let a process that is held run inside the block."""
        self.resume()
        try:
            yield
        finally:
            self.hold()

    def end(self) -> None:
        """End it, its children too; wait for it."""
        self.resume()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._signal(signal.SIGKILL)  # what is left of the group
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class EndedError(Exception):
    """A process that ended instead of answering."""


class Answering:
    """A Python module that answers each line of JSON with a line; between two questions it is held.

    The first line that it writes says that it is ready.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """As `Process`."""
        self._name = " ".join(arguments)
        self._process = Process(arguments, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Raises EndedError."""
        self._read()
        self._process.hold()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Raises EndedError."""
        with self._process.running():
            questions, _ = self._process.pipes
            questions.write(json.dumps(dict(question)) + "\n")
            questions.flush()
            return self._read()

    def end(self) -> None:
        self._process.end()

    def _read(self) -> dict[str, Any]:
        _, answers = self._process.pipes
        line = answers.readline()
        if not line:
            raise EndedError(f"{self._name} ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer
