"""Options of a benchmark run, shared by all sections."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.bench.models import Models


@dataclass(frozen=True)
class Options:
    models: Models
    bundles: Path  # folder of the shipped bundles
    sentences: Sequence[str]
    rounds: int  # each figure is the median over this number of rounds
    max_clients: int  # cases with more clients or rows are skipped
    seconds: float  # duration of each load on a server
    requests: int  # number of requests of the memory section
    minutes: float  # duration of the soak test
    threads: int  # for each peer, and for Sightline's engine without the service
    default_model: str = ""  # in the folder of bundles, for calls that name no model
    is_quick: bool = False  # use the first settings of peers instead of searching the best ones

    def allowed(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of clients or rows that are not skipped."""
        return [number for number in numbers if number <= self.max_clients]
