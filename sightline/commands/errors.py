"""Errors of the commands that run a model, and their exit statuses."""

from sightline.base.bundle import MissingBundleError
from sightline.commands.parser import EXIT_FAILED, EXIT_USAGE
from sightline.service.runtime.protocol import RuntimeUnavailableError
from sightline.service.settings import SettingsError


class UsageError(Exception):
    """Arguments that can never work. The message says which and what to do instead."""


USAGE_ERRORS = (
    UsageError,
    SettingsError,
    MissingBundleError,
    RuntimeUnavailableError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
)


def exit_status(error: Exception) -> int:
    """Return the exit status of a failed command: 2 if its arguments can never work, or else 1."""
    return EXIT_USAGE if isinstance(error, USAGE_ERRORS) else EXIT_FAILED
