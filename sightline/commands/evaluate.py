"""`sightline evaluate`."""

from collections.abc import Sequence

from sightline.base.parser import Parser
from sightline.export.training_check import check_files
from sightline.model.__main__ import run as run_model


def run(parser: Parser, words: Sequence[str]) -> int:
    return run_model(Parser(prog="sightline"), ["evaluate", *words], check_files)
