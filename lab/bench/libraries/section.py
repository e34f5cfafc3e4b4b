"""Compare how fast Sightline, CTranslate2 and transformers decode the same sources in turns.

Each contender is measured once before the rounds. This warms it up, and selects CTranslate2's two
fastest pairs of instruction set and 8-bit data type, and its fastest float32. The rounds measure
those and all other contenders.
"""

import contextlib
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.models import RECIPES, Subject
from lab.bench.options import Options
from lab.bench.process import EndedError, JsonWorker
from lab.bench.record import Figure, Result

WORKER = "lab.bench.libraries.worker"
ROWS = (1, 8, 32, 64)
BEAMS = {"greedy": 1, "beam 5": 5}
INSTRUCTION_SETS = ("", "AVX2", "AVX512")  # "" lets the library choose
COMPUTE_TYPES = ("float32", "int8", "int8_float32")
FIXED_TOKENS = 20  # output length; the weights are random and never end a sentence
KINDS = {  # library, and data types of the same number of bits
    "sightline, float32": ("sightline", ("float32",)),
    "ctranslate2, float32": ("ctranslate2", ("float32",)),
    "transformers, float32": ("transformers", ("float32",)),
    "sightline, int8": ("sightline", ("int8",)),
    "ctranslate2, int8": ("ctranslate2", ("int8", "int8_float32")),
    "sightline, int4": ("sightline", ("int4",)),
}
RATIOS = {
    "int8": ("sightline, int8", "ctranslate2, int8"),
    "float32": ("sightline, float32", "ctranslate2, float32"),
    "transformers": ("sightline, float32", "transformers, float32"),
}


@dataclass(frozen=True)
class Task:
    """Sources to decode and how; see `lab.bench.libraries.worker`."""

    sources: Sequence[Sequence[int]]
    num_beams: int = 1
    new_tokens: int | None = None
    at_least_s: float = 0.3


@dataclass(frozen=True)
class TaskResult:
    seconds: float
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


@dataclass(frozen=True)
class Setup:
    """A library, its data type, and the options to start it."""

    kind: str  # "sightline", "ctranslate2" or "transformers"
    dtype: str
    model: Path
    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.kind, self.dtype, *self.environment.values()])


class Contender(JsonWorker):
    """A running decoder, created by `running_contenders`."""

    def __init__(self, setup: Setup, num_threads: int) -> None:
        """Start the decoder; `wait_until_ready` raises EndedError if it does not start, for example
        because the processor lacks an instruction set.
        """
        self.setup = setup
        arguments = [WORKER, setup.kind, str(setup.model), "--threads", str(num_threads), *setup.options]
        super().__init__(arguments, os.environ | setup.environment)

    def measure(self, task: Task) -> TaskResult:
        return TaskResult(**self.request(vars(task)))


@contextlib.contextmanager
def running_contenders(setups: Sequence[Setup], num_threads: int) -> Iterator[list[Contender]]:
    """Start the setups that this machine supports, and end them when the block ends."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for setup in setups:
            contender = Contender(setup, num_threads)
            stack.callback(contender.end)
            try:
                contender.wait_until_ready()
            except EndedError:
                print(f"skipped: {setup.name} ended without a response")
                continue
            contenders.append(contender)
        yield contenders


Measured = Mapping[Contender, Sequence[TaskResult]]


def run(options: Options) -> Result:
    subject = options.models.marian
    setups = setups_of(subject, max(options.allowed(ROWS)) * max(BEAMS.values()))
    return compare(options, subject, setups)


def setups_of(subject: Subject, max_rows: int) -> list[Setup]:
    """Return the setups of every library in every data type."""
    rows = ["--max-rows", str(max_rows)]
    ours = [Setup("sightline", dtype, subject.bundle(dtype), rows) for dtype in ("float32", *RECIPES)]
    theirs = [
        Setup(
            "ctranslate2",
            compute_type,
            subject.path("ctranslate2"),
            ["--compute-type", compute_type],
            {"CT2_FORCE_CPU_ISA": instructions} if instructions else {},
        )
        for instructions in INSTRUCTION_SETS
        for compute_type in COMPUTE_TYPES
    ]
    return [*ours, *theirs, Setup("transformers", "float32", subject.path("checkpoint"))]


def compare(options: Options, subject: Subject, setups: Sequence[Setup]) -> Result:
    """Measure every case on every contender."""
    sources = subject.sources(options.sentences)
    figures: dict[str, Figure] = {}
    rows: dict[str, dict[str, Any]] = {}
    with running_contenders(setups, options.threads) as contenders:
        for decoding, num_beams in BEAMS.items():
            for count in options.allowed(ROWS):
                measured = _measure(contenders, Task(sources[:count], num_beams, FIXED_TOKENS), options.rounds)
                outputs = [output for results in measured.values() for result in results for output in result.outputs]
                if any(len(output) != FIXED_TOKENS for output in outputs):
                    raise RuntimeError(f"every output must have {FIXED_TOKENS} tokens, but the contenders differ")
                best = {name: _fastest(measured, *kind) for name, kind in KINDS.items()}
                name = f"library.{decoding}.{count}"
                figures |= {f"{name}.{key}": _ratio(best[ours], best[theirs]) for key, (ours, theirs) in RATIOS.items()}
                for kind, results in best.items():
                    speeds = [round(result.tokens_per_s, 1) for result in results]
                    rows.setdefault(kind, {"library": kind})[f"{decoding}, {count}"] = speeds
                print(f"  {name}: {figures[f'{name}.float32']}", flush=True)
    return Result(figures, list(rows.values()))


def _measure(contenders: Sequence[Contender], task: Task, rounds: int) -> Measured:
    first = {contender: contender.measure(task) for contender in contenders}
    peers = [contender for contender in contenders if contender.setup.kind == "ctranslate2"]
    peers.sort(key=lambda peer: -first[peer].tokens_per_s)
    fastest = [
        *[contender for contender in peers if contender.setup.dtype != "float32"][:2],
        *[contender for contender in peers if contender.setup.dtype == "float32"][:1],
    ]
    chosen = [contender for contender in contenders if contender not in peers or contender in fastest]
    measured: dict[Contender, list[TaskResult]] = {contender: [] for contender in chosen}
    for _ in range(rounds):
        for contender in chosen:
            measured[contender].append(contender.measure(task))
    return measured


def _fastest(measured: Measured, library: str, dtypes: Sequence[str]) -> Sequence[TaskResult]:
    """Return the results of the fastest setup of a library in any of the data types."""
    candidates = [
        results
        for contender, results in measured.items()
        if contender.setup.kind == library and contender.setup.dtype in dtypes
    ]
    return max(candidates, key=lambda results: statistics.median(result.tokens_per_s for result in results))


def _ratio(ours: Sequence[TaskResult], theirs: Sequence[TaskResult]) -> Figure:
    return Figure.of_ratios(*([result.tokens_per_s for result in results] for results in (ours, theirs)))
