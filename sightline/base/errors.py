"""Exit statuses of all commands (docs/reference/cli.md), and errors with the status of each."""

import sys
from collections.abc import Collection

EXIT_FAILED = 1  # the work failed
EXIT_USAGE = 2  # the arguments can never work
EXIT_CANNOT_SERVE = 3  # also uvicorn's status if the port is taken; a restart does not help
EXIT_LAGGED = 4  # a load test was itself too slow
EXIT_WORSE = 5  # a load test found a figure that became worse
EXIT_SIGNAL = 128  # plus the number of the signal, as in shells
EXIT_INTERRUPTED = EXIT_SIGNAL + 2
EXIT_BROKEN_PIPE = EXIT_SIGNAL + 13


class CommandError(Exception):
    """A command cannot do its work. The message states the reason and the way out."""


class UsageError(ValueError):
    """Arguments that can never work. The message names them and what to do instead."""


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """A signal ended a command. The message states how to continue."""

    def __init__(self, signal_number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.signal_number = signal_number


def exit_status(error: str | Exception) -> int:
    """Return the exit status of a failed command: 2 if its arguments can never work, or else 1.

    After a signal, it is 128 and the number of the signal.
    """
    if isinstance(error, Interrupted):
        return EXIT_SIGNAL + error.signal_number
    usage = (UsageError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    return EXIT_USAGE if isinstance(error, usage) else EXIT_FAILED


def fail(error: str | Exception, status: int | None = None) -> int:
    """Print the error of a command, and return its exit status: by default, see `exit_status`."""
    print(f"error: {error}", file=sys.stderr)
    return exit_status(error) if status is None else status


def list_of(names: Collection[str], most: int = 10, separator: str = ", ") -> str:
    """Return names for a message; of many, only the first and the number of the others."""
    shown = separator.join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown word: a similar known one, if there is one."""
    from difflib import get_close_matches  # only for errors

    similar = get_close_matches(word, known, 1)
    return f" (did you mean {similar[0]}?)" if similar else ""
