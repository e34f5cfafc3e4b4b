"""Errors of commands, and their exit statuses."""

EXIT_FAILED = 1
EXIT_USAGE = 2


class UsageError(ValueError):
    """Arguments that can never work. The message says which and what to do instead."""


def exit_status(error: Exception) -> int:
    """Return the exit status of a failed command: 2 if its arguments can never work, or else 1."""
    usage = (UsageError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    return EXIT_USAGE if isinstance(error, usage) else EXIT_FAILED
