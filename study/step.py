"""The interface of a step of `python -m study`, and the parts that several steps share."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.record import Result, Row, read_results


class Step(Protocol):
    """A module that measures one thing, and writes it up from its result alone."""

    NAME: str  # of the command and of the result's file

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, arguments: argparse.Namespace) -> Result: ...

    def tables(self, result: Result) -> Mapping[str, str]:
        """Markdown by the name of its part of the document."""

    def draw(self, result: Result, folder: Path) -> None:
        """Write pictures, in the style of `bench.plots.STYLE`, which is in force."""


def add_keep(parser: argparse.ArgumentParser, what: str) -> None:
    """The flag by which results of several machines come together."""
    text = f"keep what the last result has of {what} that are not here, for work that is spread over several machines"
    parser.add_argument("--keep", action="store_true", help=text)


def with_kept(results: Path, name: str, rows: Sequence[Row], which: Callable[[Row], Any]) -> list[Row]:
    """Rows, and before them those of the last result that are of something else, with the commit they were measured at.

    Raises:
        FileNotFoundError: there is no result to keep anything of.
    """
    last = read_results(results).get(name)
    if last is None:
        raise FileNotFoundError(f"{results} has no result of {name} to keep anything of")
    found = [which(row) for row in rows]
    kept = [{"commit": last.machine["commit"], **row} for row in last.result.rows if which(row) not in found]
    return [*kept, *rows]


def no_tables(result: Result) -> Mapping[str, str]:
    """The `tables` of a step that has none."""
    return {}


def no_pictures(result: Result, folder: Path) -> None:
    """The `draw` of a step that has no pictures."""
