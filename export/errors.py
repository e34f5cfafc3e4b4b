"""Errors of exporting and importing."""


class ImportFailedError(ValueError):
    """A checkpoint cannot be imported. The message names the file or key and the remedy."""


class VerificationError(Exception):
    """A bundle differs from its model by more than the limit; the message names the outputs."""
