"""Limits of time and memory while files that others wrote are read and checked.

A command line that reads such files runs in a child process, `run_limited`. The child limits its
memory, and a timer ends it, so that an endless loop, a panic of a library or a file that asks for
terabytes is the end of the child alone, and its parent prints one error. Functions that are called
in other processes, such as those of tests, have no limits.
"""

import ctypes
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from model.errors import EXIT_FAILED

PR_SET_PDEATHSIG = 1  # of prctl(2)
MEMORY_BYTES = 3 << 29  # beside the libraries, the files and the weights
# Stacks and buffers of the threads of libraries, of which there is one for each processor.
THREAD_BYTES = 16 << 20
SECONDS = 120.0  # of a step, for small files; a busy machine is several times slower than a quiet one
SPEED = 20e6  # bytes per second that the slowest machine reads, parses and hashes
CHECK_SPEED = 4e5  # the same of building and verifying graphs

_report: int | None = None  # file descriptor of the name of the current step; None without limits


def begin_step(name: str, num_bytes: int, speed: float = SPEED) -> None:
    """Begin a step of the work; it ends the one before. Do nothing in a process without limits.

    Args:
        name: subject and verb of the error if the step exceeds a limit, such as "reading FOLDER".
        num_bytes: size of the files or weights. The step may use as much memory again.
        speed: bytes per second that the step must reach after the first seconds.
    """
    if _report is None:
        return
    seconds = SECONDS + num_bytes / speed
    os.ftruncate(_report, 0)
    os.pwrite(_report, f"{seconds:.0f} {name}".encode(errors="backslashreplace"), 0)
    _limit_memory(MEMORY_BYTES + num_bytes + (os.cpu_count() or 1) * THREAD_BYTES)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def end_step() -> None:
    """End the step: later work has the limit of memory alone."""
    if _report is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(num_bytes: int) -> None:
    """Limit the private memory of this process and of its children to what it is now, and more."""
    with suppress(OSError, StopIteration):  # other systems than Linux have no such file
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = used + num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Raise `MemoryError` if this process needs that much memory more."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    _limit_memory(num_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def needs_limits(arguments: Sequence[str]) -> bool:
    """Return True if the command line of this process must run in another one, `run_limited`."""
    return _report is None and not {"-h", "--help"} & set(arguments)


def out_of_memory() -> str:
    """Return the error of a step that has asked for more memory than its limit."""
    step = "the command" if _report is None else _read_step(_report)[1]
    return (
        f"{step} needs more memory than is there or than files of this size need; a file of the checkpoint may be "
        "damaged: use another checkpoint, or end other programs and try again"
    )


def _read_step(report: int) -> tuple[str, str]:
    """Return the seconds and the name of the last step."""
    seconds, _, name = os.pread(report, 1 << 16, 0).decode().partition(" ")
    return seconds, name or "the command"


def run_limited(module: str, arguments: Sequence[str]) -> int:
    """Run the command line of a module in a child process with limits; return its exit status.

    Standard input, output and error are those of this process.
    """
    with tempfile.TemporaryFile() as report:
        command = [sys.executable, "-P", "-m", "export.limits", str(os.getpid()), str(report.fileno()), module]
        # The child finds modules where this process does. A panic prints no stack.
        path = os.pathsep.join(folder or os.curdir for folder in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "RUST_BACKTRACE": "0"}
        child = subprocess.Popen([*command, *arguments], pass_fds=[report.fileno()], env=environment)  # noqa: S603 - no shell
        while True:
            try:
                status = child.wait()
                break
            except KeyboardInterrupt:  # the terminal has interrupted the child, too
                continue
        if status >= 0:
            return status
        sys.stderr.write(f"error: {_reason(-status, *_read_step(report.fileno()))}\n")
        return EXIT_FAILED


def _reason(number: int, seconds: str, step: str) -> str:
    """Return the error of a step that a signal has ended."""
    if number == signal.SIGALRM:
        return (
            f"{step} took more than {seconds} seconds, so it was ended; a file of the checkpoint asks for unbounded "
            "work, or this machine is too busy: try again, or use another checkpoint"
        )
    if number == signal.SIGKILL:
        return f"{step} was ended, probably because there is too little memory; end other programs and try again"
    name = signal.Signals(number).name
    return (
        f"{step} ended with the signal {name}: a library failed on a file of the checkpoint, which may be damaged or "
        "need too much memory; download the checkpoint again, or use another one"
    )


def end_with(parent: int) -> None:
    """Let Linux end this process when its parent ends, even if the parent is killed."""
    with suppress(OSError, AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _main() -> None:
    """Run in the child: read the arguments of `run_limited`, and run the module."""
    parent, report, module, *arguments = sys.argv[1:]
    end_with(int(parent))
    # This file is the module `__main__` here, and another one for all others.
    from export import limits

    limits._report = int(report)
    os.set_inheritable(int(report), False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash of a library leaves no file
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
