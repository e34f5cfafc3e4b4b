"""Read and write the results of benchmark sections in `lab/bench/results/`."""

import dataclasses
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path("lab/bench/results")
DIGITS = 5
Row = Mapping[str, Any]  # one row of a result
NUMBERS = re.compile(r"\[\n\s+(-?\d[^\[\]{}\"]*?)\n\s*\]")  # a list of numbers that takes one line each


@dataclass(frozen=True)
class Figure:
    """A median and the values that it was computed from."""

    value: float
    unit: str
    rounds: Sequence[float]

    @classmethod
    def of(cls, rounds: Sequence[float], unit: str = "x") -> "Figure":
        return cls(rounded(statistics.median(rounds)), unit, [rounded(value) for value in rounds])

    @classmethod
    def of_ratios(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Figure":
        """Divide round by round, because a disturbance affects both values of a round."""
        return cls.of([our / their for our, their in zip(ours, theirs, strict=True)])


@dataclass(frozen=True)
class Result:
    """Figures of a section by name, the rows of its table, and facts about its peers."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    peers: Mapping[str, str] = field(default_factory=dict)  # versions and instruction set of each peer
    missing: Mapping[str, str] = field(default_factory=dict)  # the reason for each peer that was not measured
    failures: Sequence[str] = ()  # reasons for which the command fails after writing the result


@dataclass(frozen=True)
class Recorded:
    """A result together with the machine, commit and command that produced it."""

    machine: Mapping[str, Any]
    command: str
    result: Result


def write_result(folder: Path, section: str, recorded: Recorded) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {**recorded.machine, "command": recorded.command, **dataclasses.asdict(recorded.result)}
    text = NUMBERS.sub(_on_one_line, json.dumps(document, indent=1))
    (folder / f"{section}.json").write_text(text + "\n", encoding="utf-8")


def _on_one_line(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def read_results(folder: Path) -> dict[str, Recorded]:
    """Read all results of a folder, by section."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}


def _read(path: Path) -> Recorded:
    document = json.loads(path.read_text(encoding="utf-8"))
    figures = {name: Figure(**figure) for name, figure in document.pop("figures").items()}
    peers, missing, failures = (document.pop(name, {}) for name in ("peers", "missing", "failures"))
    result = Result(figures, tuple(document.pop("rows")), peers, missing, tuple(failures))
    return Recorded(command=document.pop("command"), machine=document, result=result)


def rounded(value: float, digits: int = DIGITS) -> float:
    """Round a number to significant digits."""
    return float(f"{value:.{digits}g}")
