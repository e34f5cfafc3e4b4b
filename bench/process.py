"""Processes that take turns: while one is measured, those that are held do not run at all."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

END_TIMEOUT_S = 20


class Process:
    """A Python module run in a process group of its own, its children with it."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
    ) -> None:
        """`arguments` come after `python -m`; `environment` is the whole one."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=dict(environment),
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
