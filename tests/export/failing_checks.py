"""Checks of a bundle that fail. The process that checks bundles imports them by their names."""

import os

from export.errors import VerificationError
from service.bundle import Verification


def end_process(*_: object) -> Verification:
    os._exit(9)


def differ(*_: object) -> Verification:
    raise VerificationError("hidden states differ")
