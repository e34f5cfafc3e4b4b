"""Child processes that take turns: processes that are not being measured are suspended."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

END_TIMEOUT_S = 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Result = TypeVar("Result")


def family_cpu_seconds(pid: int) -> dict[int, float]:
    """Return the CPU seconds of a process and of each of its descendants, parents first. Those of a
    process include its children that have ended. An ended process has none.
    """
    seconds: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            own = int(path.parent.name)
            seconds[own] = sum(map(int, fields[11:15])) / TICKS_PER_S  # utime, stime, cutime, cstime
            children.setdefault(int(fields[1]), []).append(own)
    family = [pid] if pid in seconds else []
    for parent in family:
        family += children.get(parent, [])
    return {member: seconds[member] for member in family}


class Process:
    """A running command, together with its descendants."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        stderr: IO[bytes] | None = None,
    ) -> None:
        """Start the process in a group of its own, with only these variables in its environment."""
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, text=True
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

    def cpu_seconds(self) -> float:
        return sum(family_cpu_seconds(self.pid).values())

    def suspend(self) -> None:
        """Suspend the process and its descendants until `resume`."""
        _signal(family_cpu_seconds(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        _signal(family_cpu_seconds(self.pid), signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let a suspended process run inside the block."""
        self.resume()
        try:
            yield
        finally:
            self.suspend()

    def end(self) -> None:
        """End the process, wait for it, and end what is left of its group."""
        self.resume()
        _signal([self.pid], signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class EndedError(Exception):
    """A worker process ended without a response."""


class JsonWorker:
    """A Python module that answers each line of JSON with one line; its first line shows that it is
    ready. It is suspended between requests.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `python -m` with the arguments; see `Process` for the environment."""
        self._name = " ".join(arguments)
        command = [sys.executable, "-m", *arguments]
        self._process = Process(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Wait for the first line. Raises `EndedError` if the process ended."""
        self._read()
        self._process.suspend()

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its response. Raises `EndedError` if the process ended."""
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


def answer_lines(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Be the process of a `JsonWorker` until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def repeat(work: Callable[[], Result], at_least_s: float) -> tuple[float, Result]:
    """Work once and for at least this time; return the median seconds and the last result."""
    seconds: list[float] = []
    while not seconds or sum(seconds) < at_least_s:
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result
