"""What a step of `python -m bench.zoo` is."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from bench.record import Result


class Step(Protocol):
    """A module that measures one thing, and writes it up from its result alone."""

    NAME: str  # of the command and of the result's file

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, arguments: argparse.Namespace) -> Result: ...

    def tables(self, result: Result) -> Mapping[str, str]:
        """Markdown by the name of its part of the document."""

    def draw(self, result: Result, folder: Path) -> None:
        """Write pictures, in the style of `bench.plots.STYLE`, which is in force."""


def no_tables(result: Result) -> Mapping[str, str]:
    """The `tables` of a step that has none."""
    return {}


def no_pictures(result: Result, folder: Path) -> None:
    """The `draw` of a step that has no pictures."""
