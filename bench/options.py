"""How a run of the bench is to be done; every section reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.models import Models


@dataclass(frozen=True)
class Options:
    models: Models
    sentences: Sequence[str]
    rounds: int  # each figure is the median of so many
    max_rows: int  # cases with more rows or clients are left out
    seconds: float  # of each load on a server
    requests: int  # of the load under which memory must not grow
    threads: int  # of each contender
