"""Compares a float16 bundle on a device with the float32 bundle on the CPU: scores, maps, greedy tokens and beams."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.engine import Engine
from service.engine.request import Event, Generated, GenerateRequest, Target
from service.parameters import GenerateParameters
from service.runtime.protocol import Runner

Array = NDArray[Any]
Ids = Sequence[int]

TOLERANCE = 0.05  # of log-probabilities and map entries; float16 on a CPU differs by 0.012 at most
CLOSE = 0.02  # two best candidates nearer than this may change places
MAX_DIFFERENT_BEAMS = 0.02  # of sentences: a near tie early in a search changes what is pruned
MAX_NEW_TOKENS = 80
NUM_BEAMS = 5


@dataclass(frozen=True)
class Equality:
    """How far two runners are apart."""

    sentences: int
    tokens: int
    max_logprob_difference: float
    max_map_difference: float
    different_tokens: int  # greedy ones that differ though no two candidates were close
    close_tokens: int  # greedy ones that differ where two candidates were
    different_beams: int  # sentences whose best of a beam search differs, and so do their scores
    close_beams: int  # sentences whose best differs and has nearly the same score

    def failures(self) -> list[str]:
        """What is out of tolerance; nothing where all is well."""
        found = []
        for what, difference in (("log-probabilities", self.max_logprob_difference), ("maps", self.max_map_difference)):
            if not difference <= TOLERANCE:  # NaN too
                found.append(f"{what} differ by {difference:.3g}, {TOLERANCE} is allowed")
        if self.different_tokens:
            found.append(f"{self.different_tokens} of {self.tokens} greedy tokens differ")
        if self.different_beams > MAX_DIFFERENT_BEAMS * self.sentences:
            found.append(f"{self.different_beams} of {self.sentences} beam searches differ")
        return found


def compare(expected: Runner, given: Runner, sources: Sequence[Ids]) -> Equality:
    """Steps of both over the greedy tokens of `expected`, then whole beam searches through the engine."""
    steps = [_compare_batch(expected, given, batch) for batch in _batches(sources, expected.max_rows)]
    beams = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS, num_beams=NUM_BEAMS)
    searches = zip(generate(expected, sources, beams), generate(given, sources, beams), strict=True)
    apart = [abs(one.score - other.score) for one, other in searches if ids(one) != ids(other)]
    return Equality(
        sentences=len(sources),
        tokens=sum(step.tokens for step in steps),
        # NumPy's maximum keeps NaN, which Python's may lose.
        max_logprob_difference=float(np.max([step.logprobs for step in steps])),
        max_map_difference=float(np.max([step.maps for step in steps])),
        different_tokens=sum(step.different for step in steps),
        close_tokens=sum(step.close for step in steps),
        different_beams=sum(not difference <= CLOSE for difference in apart),
        close_beams=sum(difference <= CLOSE for difference in apart),
    )


def generate(runner: Runner, sources: Sequence[Ids], parameters: GenerateParameters) -> list[Target]:
    """The best output of each source through the engine, all submitted at once."""
    engine = Engine(runner)
    results: list[list[Event]] = [[] for _ in sources]
    for source, events in zip(sources, results, strict=True):
        engine.submit(GenerateRequest("gpu", tuple(source), math.inf, parameters), events.append)
    while engine.has_work:
        engine.step()
    return [_best(events[-1]) for events in results]


def _best(result: Event) -> Target:
    assert isinstance(result, Generated), result
    return result.targets[0]


def ids(target: Target) -> list[int]:
    return [token.id for token in target.tokens]


def _batches(sources: Sequence[Ids], size: int) -> list[Sequence[Ids]]:
    return [sources[start : start + size] for start in range(0, len(sources), size)]


@dataclass
class _Difference:
    tokens: int = 0
    logprobs: float = 0.0
    maps: float = 0.0
    different: int = 0
    close: int = 0


def _compare_batch(expected: Runner, given: Runner, sources: Sequence[Ids]) -> _Difference:
    manifest, found = expected.manifest, _Difference()
    lengths = np.array([len(source) for source in sources], np.int32)
    padded = np.full((len(sources), lengths.max()), manifest.tokens.pad_id, np.int64)
    for row, source in enumerate(sources):
        padded[row, : len(source)] = source
    for runner in (expected, given):
        runner.fill(0, runner.encode(padded, lengths, runner.manifest.encoder.outputs), range(len(sources)))
    maps = {name: kind for kind in ("cross", "decoder") for name in manifest.attention_of(kind).outputs}
    outputs = ("logprobs", "top_ids", *maps)
    tokens = np.full(len(sources), manifest.tokens.start_id, np.int64)
    is_open = np.ones(len(sources), bool)
    for age in range(min(MAX_NEW_TOKENS, manifest.limits.max_target_tokens)):
        ages = np.full(len(sources), age, np.int32)
        right, other = (dict(runner.step(tokens, ages, lengths, outputs)) for runner in (expected, given))
        columns = {"cross": lengths, "decoder": ages + 1}
        differences = [_map_difference(right[name], other[name], columns[kind]) for name, kind in maps.items()]
        found.maps = float(np.max([found.maps, *differences]))
        _compare_scores(found, right, other, is_open)
        tokens = right["top_ids"][:, 0].copy()
        is_open &= tokens != manifest.tokens.end_id
        if not is_open.any():
            break
    return found


def _compare_scores(
    found: _Difference, right: Mapping[str, Array], other: Mapping[str, Array], is_open: NDArray[np.bool_]
) -> None:
    """Of the rows that have not ended."""
    logprobs, best = right["logprobs"][is_open], right["top_ids"][is_open, 0]
    found.tokens += len(best)
    found.logprobs = float(np.maximum(found.logprobs, np.abs(other["logprobs"][is_open] - logprobs).max()))
    second, first = np.sort(logprobs, axis=1)[:, -2:].T
    is_other = other["top_ids"][is_open, 0] != best
    is_close = first - second < CLOSE
    found.different += int((is_other & ~is_close).sum())
    found.close += int((is_other & is_close).sum())


def _map_difference(right: Array, other: Array, columns: Array) -> float:
    """Of each row's own columns; beyond them a bundle's maps mean nothing."""
    width = min(right.shape[-1], other.shape[-1])
    is_own = np.arange(width) < columns[:, None, None, None]
    difference = np.abs(other[..., :width].astype(np.float32) - right[..., :width])
    return float(np.where(is_own, difference, 0.0).max())
