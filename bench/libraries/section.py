"""Compare how fast Sightline, CTranslate2 and transformers decode the same sources in turns.

Each contender is measured once before the rounds. This warms it up, and selects CTranslate2's two
fastest pairs of instruction set and data type, and its fastest float32. The rounds measure those
and all other contenders.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.libraries.contender import Contender, Setup, Task, TaskResult, running_contenders
from bench.models import Subject
from bench.options import Options
from bench.record import Figure, Result

ROWS = (1, 8, 32, 64)
BEAMS = {"greedy": 1, "beam 5": 5}
INSTRUCTION_SETS = ("", "AVX2", "AVX512")  # "" lets the library choose
COMPUTE_TYPES = ("float32", "int8", "int8_float32")
FIXED_TOKENS = 20  # output length if the weights are random and never end a sentence
# Limit for float32 outputs. Libraries round differently, so that beam searches sometimes end
# differently.
MAX_TOKENS_DIFFERENCE = 0.1

Measured = Mapping[Contender, Sequence[TaskResult]]


def run_tiny(options: Options) -> Result:
    subject = options.models.tiny
    return compare(options, subject, setups_of(subject, _max_rows(options)), new_tokens=None)


def run_base(options: Options) -> Result:
    subject = options.models.random_base
    return compare(options, subject, setups_of(subject, _max_rows(options)), FIXED_TOKENS)


def _max_rows(options: Options) -> int:
    return min(options.max_rows, max(ROWS)) * max(BEAMS.values())


def setups_of(subject: Subject, max_rows: int) -> list[Setup]:
    """Return the setups of every library in every data type."""
    ours = [
        Setup("sightline", dtype, bundle, ["--max-rows", str(max_rows)]) for dtype, bundle in subject.bundles.items()
    ]
    theirs = [
        Setup(
            "ctranslate2",
            compute_type,
            subject.ctranslate2,
            ["--compute-type", compute_type],
            {"CT2_FORCE_CPU_ISA": instructions} if instructions else {},
        )
        for instructions in INSTRUCTION_SETS
        for compute_type in COMPUTE_TYPES
    ]
    return [*ours, *theirs, Setup("transformers", "float32", subject.bundles["float32"])]


def compare(options: Options, subject: Subject, setups: Sequence[Setup], new_tokens: int | None) -> Result:
    """Measure every case on every contender; see `Decoder.decode` for `new_tokens`."""
    sources = subject.sources(options.sentences)
    figures: dict[str, Figure] = {}
    rows: list[dict[str, Any]] = []
    with running_contenders(setups, options.threads) as contenders:
        for decoding, num_beams in BEAMS.items():
            for count in (count for count in ROWS if count <= options.max_rows):
                task = Task(sources[:count], num_beams, new_tokens)
                measured = _measure(contenders, task, options.rounds)
                _check_same_work(measured, new_tokens)
                name = f"library.{subject.name}.{decoding}.{count}"
                figures |= {f"{name}.{key}": figure for key, figure in _ratios(measured).items()}
                rows += [{"decoding": decoding, "rows": count, **row} for row in _rows(measured)]
                print(f"  {name}", flush=True)
    return Result(figures, rows)


def _measure(contenders: Sequence[Contender], task: Task, rounds: int) -> Measured:
    first = {contender: contender.measure(task) for contender in contenders}
    peers = [contender for contender in contenders if contender.setup.kind == "ctranslate2"]
    peers.sort(key=lambda one: -first[one].tokens_per_s)
    fastest = [*peers[:2], *[contender for contender in peers if _is_float32(contender.setup)][:1]]
    chosen = [one for one in contenders if one not in peers or one in fastest]
    measured: dict[Contender, list[TaskResult]] = {contender: [] for contender in chosen}
    for _ in range(rounds):
        for contender in chosen:
            measured[contender].append(contender.measure(task))
    return measured


def _check_same_work(measured: Measured, new_tokens: int | None) -> None:
    """Check the numbers of output tokens.

    Raises:
        RuntimeError: The contenders did not do the same work.
    """
    outputs = [output for results in measured.values() for result in results for output in result.outputs]
    if new_tokens is not None and any(len(output) != new_tokens for output in outputs):
        raise RuntimeError(f"every output must have {new_tokens} tokens")
    counts = {one.setup.name: results[0].num_tokens for one, results in measured.items() if _is_float32(one.setup)}
    if max(counts.values()) > (1 + MAX_TOKENS_DIFFERENCE) * min(counts.values()):
        raise RuntimeError(
            f"the outputs of the contenders differ in length by more than {MAX_TOKENS_DIFFERENCE:.0%}: {counts}"
        )


def _is_float32(setup: Setup) -> bool:
    return setup.dtype == "float32"


def _ratios(measured: Measured) -> dict[str, Figure]:
    """Return Sightline's tokens per second relative to its peers: the best setups, float32, and
    transformers.
    """

    def best(library: str, is_candidate: Callable[[Setup], bool] = lambda setup: True) -> Sequence[TaskResult]:
        candidates = [one for one in measured if one.setup.kind == library and is_candidate(one.setup)]
        return measured[max(candidates, key=lambda one: _speed(measured[one]))]

    def ratio(ours: Sequence[TaskResult], theirs: Sequence[TaskResult]) -> Figure:
        return Figure.of([one.tokens_per_s / other.tokens_per_s for one, other in zip(ours, theirs, strict=True)])

    return {
        "best": ratio(best("sightline"), best("ctranslate2")),
        "float32": ratio(best("sightline", _is_float32), best("ctranslate2", _is_float32)),
        "transformers": ratio(best("sightline"), best("transformers")),
    }


def _speed(results: Sequence[TaskResult]) -> float:
    return statistics.median(result.tokens_per_s for result in results)


def _rows(measured: Measured) -> list[dict[str, Any]]:
    """Return a row for each contender; `equal` counts the outputs that equal Sightline's float32
    outputs.
    """
    (reference,) = (one for one in measured if (one.setup.kind, one.setup.dtype) == ("sightline", "float32"))
    expected = measured[reference][0].outputs
    return [
        {
            "contender": contender.setup.name,
            "ms": [round(1000 * result.seconds, 3) for result in results],
            "tokens": results[0].num_tokens,
            "tokens_per_s": round(_speed(results), 1),
            "equal": sum(ours == theirs for ours, theirs in zip(expected, results[0].outputs, strict=True)),
        }
        for contender, results in measured.items()
    ]
