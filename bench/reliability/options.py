"""How a measurement of reliability is done."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    sentences: Sequence[str]
    rounds: int  # each figure is the median of so many
    seconds: float  # of each load
