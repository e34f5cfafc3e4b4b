"""Options of the reliability measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    bundles: Path  # folder to serve
    sentences: Sequence[str]
    rounds: int  # each figure is the median over this number of rounds
    seconds: float  # duration of each load
    clients: int  # maximum number of clients of a load
    threads: int  # for each graph; 0 is the service's default
