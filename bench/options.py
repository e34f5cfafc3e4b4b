"""Options of a benchmark run, shared by all sections."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.models import Models


@dataclass(frozen=True)
class Options:
    models: Models
    sentences: Sequence[str]
    rounds: int  # each figure is the median over this number of rounds
    max_rows: int  # cases with more rows or clients are skipped
    seconds: float  # duration of each load on a server
    requests: int  # number of requests of the memory section
    threads: int  # for each contender
