"""Limits of time and memory while files that others wrote are read and checked.

A command line that reads such files runs in a child process, `run_limited`. The kernel limits its
memory, its processor time and, with a timer, the elapsed time, so that an endless loop, a panic of
a library or a file that asks for terabytes is the end of the child alone, and its parent prints one
error. Functions that are called in other processes, such as those of tests, have no limits.
"""

import ctypes
import math
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from sightline.base.errors import EXIT_FAILED, fail
from sightline.base.machine import limit_memory

PR_SET_PDEATHSIG = 1  # of prctl(2)
MEMORY_BYTES = 3 << 29  # beside the libraries, the files and the weights
# Stacks and buffers of the threads of libraries, of which there is one for each processor.
THREAD_BYTES = 16 << 20
SECONDS = 60.0  # of the processor, for the steps of a command that reads small files
# The elapsed time has another limit: on a busy machine, a process gets a part of a processor, and
# some work needs no processor, such as waiting for a disk.
ELAPSED_FACTOR = 5
GGUF_GROWTH = 8  # times the size of a file with 4 bits for each weight is its size in float32
SPEED = 20e6  # bytes per second that the slowest machine reads, parses and hashes
CHECK_SPEED = 4e5  # the same of building and verifying graphs
MAX_MESSAGE_BYTES = 400  # of a library, in an error
STDERR = 2  # file descriptor

_report: int | None = None  # file descriptor of the name of the current step; None without limits
_begun = (0.0, 0.0, 0.0)  # processor time and clock at the first step; seconds for the files so far


def begin_step(name: str, num_bytes: int, speed: float = SPEED, *, is_first: bool = True) -> None:
    """Begin a step of the work; it ends the one before. Do nothing in a process without limits.

    Args:
        name: subject and verb of the error if the step exceeds a limit, such as "reading FOLDER".
        num_bytes: size of the files or weights. The step may use as much memory again.
        speed: bytes per second that the step must reach after the first seconds.
        is_first: False if the step shares the first seconds with the steps before it.
    """
    global _begun
    if _report is None:
        return
    processor, clock, work = (time.process_time(), time.monotonic(), 0.0) if is_first else _begun
    work += num_bytes / speed
    _begun = (processor, clock, work)
    processors = os.cpu_count() or 1
    processor_seconds = math.ceil(SECONDS + work * processors)  # work on large weights has several threads
    elapsed_seconds = ELAPSED_FACTOR * (SECONDS + work)
    os.ftruncate(_report, 0)
    os.pwrite(_report, f"{processor_seconds} {elapsed_seconds:.0f} {name}".encode(errors="backslashreplace"), 0)
    limit_memory(MEMORY_BYTES + num_bytes + processors * THREAD_BYTES)
    _limit_processor_time(math.ceil(processor) + processor_seconds)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, clock + elapsed_seconds - time.monotonic()))


def end_step() -> None:
    """End the step: later work has the limit of memory alone."""
    if _report is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _limit_processor_time(None)


def _limit_processor_time(seconds: int | None) -> None:
    """Let the kernel end this process after this processor time since its start; None: never."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = hard if seconds is None else seconds if hard == resource.RLIM_INFINITY else min(seconds, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def folder_bytes(path: Path, allowed: Iterable[Path] = ()) -> int:
    """Return the size of the files of a checkpoint, a file or a folder, in bytes.

    Links to files outside of the folder and of the folders `allowed`, which are never read, do not
    count. `/proc/kcore` has 128 TiB.
    """
    if path.is_file():
        return path.stat().st_size
    roots = [root.resolve() for root in (path, *allowed)]
    files = [file.resolve() for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files if any(file.is_relative_to(root) for root in roots))


def needs_limits(arguments: Sequence[str]) -> bool:
    """Return True if the command line of this process must run in another one, `run_limited`."""
    return _report is None and not {"-h", "--help"} & set(arguments)


def out_of_memory() -> str:
    """Return the error of a step that has asked for more memory than its limit."""
    step = "the command" if _report is None else _read_step(_report)[2]
    return (
        f"{step} needs more memory than is there or than files of this size need; a third-party file may be damaged: "
        "use another checkpoint or tokenizer, or end other programs and try again"
    )


def _read_step(report: int) -> tuple[str, str, str]:
    """Return the limits of the last step, of processor time and elapsed time, and its name."""
    processor, elapsed, name = [*os.pread(report, 1 << 16, 0).decode().split(" ", 2), "", "", ""][:3]
    return processor, elapsed, name or "the command"


def run_limited(
    module: str, arguments: Sequence[str], status_of_signal: int = EXIT_FAILED, temporary: Path | None = None
) -> int:
    """Run the command line of a module in a child process with limits; return its exit status.

    It is `status_of_signal` if a signal ends the child, such as that of a limit. Standard input and
    output are those of this process; with `temporary`, a folder for temporary files, there is no
    output. Standard error is that of this process for Python; messages of libraries in other
    languages, such as those of a panic, are only part of an error.
    """
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as messages:
        files = [report.fileno(), messages.fileno()]
        command = [sys.executable, "-P", "-m", "sightline.export.limits", *map(str, [os.getpid(), *files]), module]
        # The child finds modules where this process does. A panic prints no stack.
        path = os.pathsep.join(folder or os.curdir for folder in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "RUST_BACKTRACE": "0"}
        environment |= {"TMPDIR": str(temporary.resolve())} if temporary else {}
        output = subprocess.DEVNULL if temporary else None
        child = subprocess.Popen([*command, *arguments], pass_fds=files, env=environment, stdout=output)  # noqa: S603 - no shell
        while True:
            try:
                status = child.wait()
                break
            except KeyboardInterrupt:  # the terminal has interrupted the child, too
                continue
        if status >= 0:
            return status
        messages.seek(0)
        lines = messages.read(MAX_MESSAGE_BYTES).decode(errors="replace").splitlines()
        message = " ".join(line for line in lines if line and not line.startswith("note: "))
        return fail(_reason(-status, *_read_step(report.fileno()), message), status_of_signal)


def _reason(number: int, processor: str, elapsed: str, step: str, message: str) -> str:
    """Return the error of a step that a signal has ended after a message of a library."""
    if number == signal.SIGXCPU:
        return (
            f"{step} was ended, because the command had used {processor} seconds of processor time; a third-party file "
            "asks for unbounded work: use another checkpoint or tokenizer"
        )
    if number == signal.SIGALRM:
        return (
            f"{step} was ended, because the command had run for {elapsed} seconds; this machine is too busy, or a "
            "third-party file asks for unbounded work: try again, or use another checkpoint or tokenizer"
        )
    if number == signal.SIGKILL:
        return f"{step} was ended, probably because there is too little memory; end other programs and try again"
    name = signal.Signals(number).name
    return (
        f"{step} ended with the signal {name}: a library failed on a third-party file, which may be damaged or need "
        f"too much memory{message and f' ({message})'}; download it again, or use another one"
    )


def end_with(parent: int) -> None:
    """Let Linux end this process when its parent ends, even if the parent is killed."""
    with suppress(OSError, AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _main() -> None:
    """Run in the child: read the arguments of `run_limited`, and run the module."""
    parent, report, messages, module, *arguments = sys.argv[1:]
    end_with(int(parent))
    # Python's messages keep the stream. Libraries write to the file descriptor itself.
    sys.stderr = os.fdopen(os.dup(STDERR), "w", buffering=1, errors="backslashreplace")
    os.dup2(int(messages), STDERR)
    os.close(int(messages))
    # This file is the module `__main__` here, and another one for all others.
    from sightline.export import limits

    limits._report = int(report)
    os.set_inheritable(int(report), False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash of a library leaves no file
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
