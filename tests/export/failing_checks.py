"""Checks of a bundle that fail. The process that checks bundles imports them by their names."""

import os

from sightline.base.bundle import Verification
from sightline.export.import_errors import VerificationError


def end_process(*_: object) -> Verification:
    os._exit(9)


def differ(*_: object) -> Verification:
    raise VerificationError("hidden states differ")
