"""Child processes that take turns: processes that are not being measured are suspended."""

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
    """A Python module running in its own process group, together with its children."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
    ) -> None:
        """Start the process.

        Args:
            arguments: Command line after `python -m`.
            environment: All environment variables of the process.
            folder: Working directory; that of this process by default.
            stdin: As for `subprocess.Popen`.
            stdout: As for `subprocess.Popen`.
        """
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
        """The streams to its standard input and from its standard output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def suspend(self) -> None:
        """Suspend the process group until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let a suspended process run inside the block."""
        self.resume()
        try:
            yield
        finally:
            self.suspend()

    def end(self) -> None:
        """End the process and its children and wait for it."""
        self.resume()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._signal(signal.SIGKILL)  # children that ignored SIGTERM
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class EndedError(Exception):
    """A worker process ended without a response."""


class JsonWorker:
    """A Python module that answers each line of JSON with one line; it is suspended between
    requests.

    The first line that it writes shows that it is ready.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process; see `Process` for the arguments."""
        self._name = " ".join(arguments)
        self._process = Process(arguments, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Wait for the first line.

        Raises:
            EndedError: The process ended.
        """
        self._read()
        self._process.suspend()

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its response.

        Raises:
            EndedError: The process ended.
        """
        with self._process.running():
            requests, _ = self._process.pipes
            requests.write(json.dumps(dict(body)) + "\n")
            requests.flush()
            return self._read()

    def end(self) -> None:
        self._process.end()

    def _read(self) -> dict[str, Any]:
        _, responses = self._process.pipes
        line = responses.readline()
        if not line:
            raise EndedError(f"{self._name} ended without a response")
        response: dict[str, Any] = json.loads(line)
        return response
