"""Options of a measurement of reliability."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    bundles: Path  # the folder that is served
    sentences: Sequence[str]
    rounds: int  # each figure is their median
    seconds: float  # of each load
    clients: int  # of the largest load, at most
    threads: int  # of each graph's run; 0 is the service's default
