"""Errors of exporting and importing."""

from sightline.base.errors import CommandError

MAX_MESSAGE = 2000  # characters


class ImportFailedError(CommandError, ValueError):
    """A checkpoint cannot be imported. The message names the file or key and the remedy."""


class VerificationError(CommandError):
    """A bundle differs from its model by more than the limit; the message names the outputs."""


def one_line(error: BaseException | str) -> str:
    """Return an error or a note with escapes for line breaks and control characters.

    Names of files and tensors, which others have chosen, can have such characters, and any length:
    the middle of a long message is left out.
    """
    text = str(error)
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} … {text[-MAX_MESSAGE // 2 :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
