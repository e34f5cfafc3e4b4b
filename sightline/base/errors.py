"""Errors of commands with their exit statuses, and exceptions that are no failures."""

import asyncio

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNAL = 128  # plus the number of the signal, as in shells


# Exceptions that end a task or the process. All others are failures of one call or one bundle, also
# those that are not subclasses of Exception: a panic of a library that is written in Rust is one.
INTERRUPTIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class UsageError(ValueError):
    """Arguments that can never work. The message says which and what to do instead."""


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """A signal ended a command. The message says how to continue."""

    def __init__(self, signal_number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.signal_number = signal_number


def exit_status(error: Exception) -> int:
    """Return the exit status of a failed command: 2 if its arguments can never work, or else 1.

    After a signal, it is 128 and the number of the signal.
    """
    if isinstance(error, Interrupted):
        return EXIT_SIGNAL + error.signal_number
    usage = (UsageError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    return EXIT_USAGE if isinstance(error, usage) else EXIT_FAILED


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True for an allocation failure of PyTorch, which has no exception class on a CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
