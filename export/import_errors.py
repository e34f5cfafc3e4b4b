"""Errors of exporting and importing."""


class ImportFailedError(ValueError):
    """A checkpoint cannot be imported. The message names the file or key and the remedy."""


class VerificationError(Exception):
    """A bundle differs from its model by more than the limit; the message names the outputs."""


def one_line(error: BaseException) -> str:
    """Return the message of an error with escapes for line breaks and control characters.

    Names of files and tensors, which others have chosen, can have such characters.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(error))
