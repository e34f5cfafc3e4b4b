"""The interface of a step of `python -m lab.study`, and functions that several steps share."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lab.bench.record import Result, Row, read_results


class Step(Protocol):
    """Interface of a module that measures one thing and formats its result. For missing or
    unsuitable input, `measure` raises `FileNotFoundError` or `ValueError`.
    """

    NAME: str  # of the command and of the result file

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, arguments: argparse.Namespace) -> Result: ...

    def tables(self, result: Result) -> Mapping[str, str]:
        """Return Markdown by the names of its parts of the documents."""


@runtime_checkable
class Drawing(Protocol):
    """Interface of a step with pictures."""

    def draw(self, result: Result, folder: Path) -> None:
        """Write pictures in the style of `lab.bench.style`."""


def add_keep(parser: argparse.ArgumentParser, rows: str) -> None:
    """Add the flag that merges results of several machines."""
    text = f"keep the {rows} of the last result that are not in this folder, to merge results of several machines"
    parser.add_argument("--keep", action="store_true", help=text)


def keep_last_rows(results: Path, name: str, rows: Sequence[Row], key: Callable[[Row], Any]) -> list[Row]:
    """Add the rows of the last result with other keys before `rows`, each with the commit that
    measured it. Raises `FileNotFoundError` without a last result.
    """
    last = read_results(results).get(name)
    if last is None:
        raise FileNotFoundError(f"{results} has no result of {name} to keep rows of; run without --keep")
    keys = [key(row) for row in rows]
    kept = [{"commit": last.machine["commit"], **row} for row in last.result.rows if key(row) not in keys]
    return [*kept, *rows]
