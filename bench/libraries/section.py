"""Library against library: how fast the engine, CTranslate2 and transformers decode the same sources, by turns.

Contenders are measured once each before the rounds. That warms them, and it picks CTranslate2's two fastest pairs of
instruction set and type of numbers, and its fastest float32; the rounds measure those beside all of the others.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.libraries.contender import Answer, Contender, Setup, Task, contending
from bench.models import Subject
from bench.options import Options
from bench.record import Figure, Result

ROWS = (1, 8, 32, 64)
BEAMS = {"greedy": 1, "beam 5": 5}
INSTRUCTION_SETS = ("", "AVX2", "AVX512")  # "" leaves the choice to the library
COMPUTE_TYPES = ("float32", "int8", "int8_float32")
FIXED_TOKENS = 20  # of each output, where the weights are random and never end a sentence
# Of outputs in float32: libraries round differently, and end a search of beams differently now and then.
MAX_TOKENS_DIFFERENCE = 0.1

Measured = Mapping[Contender, Sequence[Answer]]


def run_tiny(options: Options) -> Result:
    subject = options.models.tiny
    return compare(options, subject, setups_of(subject, _most_rows(options)), new_tokens=None)


def run_base(options: Options) -> Result:
    subject = options.models.random_base
    return compare(options, subject, setups_of(subject, _most_rows(options)), FIXED_TOKENS)


def _most_rows(options: Options) -> int:
    return min(options.max_rows, max(ROWS)) * max(BEAMS.values())


def setups_of(subject: Subject, max_rows: int) -> list[Setup]:
    """Every library in every type of numbers."""
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
    """Every case on every contender; `new_tokens` as in `Decoder.decode`."""
    sources = subject.sources(options.sentences)
    figures: dict[str, Figure] = {}
    rows: list[dict[str, Any]] = []
    with contending(setups, options.threads) as contenders:
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
    measured: dict[Contender, list[Answer]] = {contender: [] for contender in chosen}
    for _ in range(rounds):
        for contender in chosen:
            measured[contender].append(contender.measure(task))
    return measured


def _check_same_work(measured: Measured, new_tokens: int | None) -> None:
    """Raises RuntimeError where contenders did not do the same work."""
    outputs = [output for answers in measured.values() for answer in answers for output in answer.outputs]
    if new_tokens is not None and any(len(output) != new_tokens for output in outputs):
        raise RuntimeError(f"not every output has {new_tokens} tokens")
    counts = {one.setup.name: answers[0].num_tokens for one, answers in measured.items() if _is_float32(one.setup)}
    if max(counts.values()) > (1 + MAX_TOKENS_DIFFERENCE) * min(counts.values()):
        raise RuntimeError(f"the contenders' outputs differ too much in length: {counts}")


def _is_float32(setup: Setup) -> bool:
    return setup.dtype == "float32"


def _ratios(measured: Measured) -> dict[str, Figure]:
    """Our tokens a second over theirs: best against best, float32 against float32, best against transformers."""

    def best(library: str, is_wanted: Callable[[Setup], bool] = lambda setup: True) -> Sequence[Answer]:
        candidates = [one for one in measured if one.setup.kind == library and is_wanted(one.setup)]
        return measured[max(candidates, key=lambda one: _speed(measured[one]))]

    def ratio(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Figure:
        return Figure.of([one.tokens_per_s / other.tokens_per_s for one, other in zip(ours, theirs, strict=True)])

    return {
        "best": ratio(best("sightline"), best("ctranslate2")),
        "float32": ratio(best("sightline", _is_float32), best("ctranslate2", _is_float32)),
        "transformers": ratio(best("sightline"), best("transformers")),
    }


def _speed(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.tokens_per_s for answer in answers)


def _rows(measured: Measured) -> list[dict[str, Any]]:
    """A row a contender; `equal` counts the outputs that are those of our float32."""
    (reference,) = (one for one in measured if (one.setup.kind, one.setup.dtype) == ("sightline", "float32"))
    expected = measured[reference][0].outputs
    return [
        {
            "contender": contender.setup.name,
            "ms": [round(1000 * answer.seconds, 3) for answer in answers],
            "tokens": answers[0].num_tokens,
            "tokens_per_s": round(_speed(answers), 1),
            "equal": sum(ours == theirs for ours, theirs in zip(expected, answers[0].outputs, strict=True)),
        }
        for contender, answers in measured.items()
    ]
