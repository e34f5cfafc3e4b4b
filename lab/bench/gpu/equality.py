"""Compare a float16 bundle on a device with a float32 bundle on the CPU: scores, maps, greedy
tokens and beams.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.service.engine.engine import Engine
from sightline.service.engine.request import Event, Generated, GenerateRequest, Target
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import Runner

Array = NDArray[Any]
Ids = Sequence[int]

TOLERANCE = 0.05  # for log-probabilities and attention weights; float16 on a CPU differs by at most 0.012
CLOSE = 0.02  # rounding may swap the two best candidates if they are closer than this
MAX_DIFFERENT_BEAMS = 0.02  # fraction of sentences: a near tie early in a search changes which beams are pruned
MAX_NEW_TOKENS = 80
NUM_BEAMS = 5


@dataclass(frozen=True)
class Equality:
    """The differences between two runners."""

    sentences: int
    tokens: int
    max_logprob_difference: float
    max_map_difference: float
    different_tokens: int  # greedy tokens that differ although no two candidates were close
    close_tokens: int  # greedy tokens that differ where two candidates were close
    different_beams: int  # sentences whose best beam differs, with a different score
    close_beams: int  # sentences whose best beam differs, with nearly the same score

    def failures(self) -> list[str]:
        """Return a message for each difference above its tolerance."""
        found = []
        for name, difference in (("log-probabilities", self.max_logprob_difference), ("maps", self.max_map_difference)):
            if not difference <= TOLERANCE:  # also true for NaN
                found.append(f"{name} differ by {difference:.3g}, at most {TOLERANCE} is allowed")
        if self.different_tokens:
            found.append(f"{self.different_tokens} of {self.tokens} greedy tokens differ")
        if self.different_beams > MAX_DIFFERENT_BEAMS * self.sentences:
            found.append(f"{self.different_beams} of {self.sentences} beam searches differ")
        return found


def compare(expected: Runner, actual: Runner, sources: Sequence[Ids]) -> Equality:
    """Compare all steps for the greedy tokens of `expected`, then whole beam searches through the
    engine.
    """
    steps = [_compare_batch(expected, actual, batch) for batch in _batches(sources, expected.max_rows)]
    beams = GenerateParameters(max_new_tokens=MAX_NEW_TOKENS, num_beams=NUM_BEAMS)
    searches = zip(generate(expected, sources, beams), generate(actual, sources, beams), strict=True)
    apart = [abs(one.score - other.score) for one, other in searches if ids(one) != ids(other)]
    return Equality(
        sentences=len(sources),
        tokens=sum(step.tokens for step in steps),
        # NumPy's maximum keeps NaN; Python's may drop it.
        max_logprob_difference=float(np.max([step.logprobs for step in steps])),
        max_map_difference=float(np.max([step.maps for step in steps])),
        different_tokens=sum(step.different for step in steps),
        close_tokens=sum(step.close for step in steps),
        different_beams=sum(not difference <= CLOSE for difference in apart),
        close_beams=sum(difference <= CLOSE for difference in apart),
    )


def generate(runner: Runner, sources: Sequence[Ids], parameters: GenerateParameters) -> list[Target]:
    """Return the best output of each source from the engine, which gets all sources at once."""
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


def _compare_batch(expected: Runner, actual: Runner, sources: Sequence[Ids]) -> _Difference:
    manifest, found = expected.manifest, _Difference()
    lengths = np.array([len(source) for source in sources], np.int32)
    padded = np.full((len(sources), lengths.max()), manifest.tokens.pad_id, np.int64)
    for row, source in enumerate(sources):
        padded[row, : len(source)] = source
    for runner in (expected, actual):
        runner.init_rows(0, runner.encode(padded, lengths, runner.manifest.encoder_graph.outputs), range(len(sources)))
    maps = {name: kind for kind in ("cross", "decoder") for name in manifest.attention_of(kind).outputs}
    outputs = ("logprobs", "top_ids", *maps)
    tokens = np.full(len(sources), manifest.tokens.start_ids[0], np.int64)
    is_open = np.ones(len(sources), bool)
    for age in range(min(MAX_NEW_TOKENS, manifest.limits.max_target_tokens)):
        ages = np.full(len(sources), age, np.int32)
        reference, other = (dict(runner.step(tokens, ages, lengths, outputs)) for runner in (expected, actual))
        columns = {"cross": lengths, "decoder": ages + 1}
        differences = [_map_difference(reference[name], other[name], columns[kind]) for name, kind in maps.items()]
        found.maps = float(np.max([found.maps, *differences]))
        _compare_scores(found, reference, other, is_open)
        tokens = reference["top_ids"][:, 0].copy()
        is_open &= tokens != manifest.tokens.end_id
        if not is_open.any():
            break
    return found


def _compare_scores(
    found: _Difference, reference: Mapping[str, Array], other: Mapping[str, Array], is_open: NDArray[np.bool_]
) -> None:
    """Add the differences of the rows that have not ended."""
    logprobs, best = reference["logprobs"][is_open], reference["top_ids"][is_open, 0]
    found.tokens += len(best)
    found.logprobs = float(np.maximum(found.logprobs, np.abs(other["logprobs"][is_open] - logprobs).max()))
    second, first = np.sort(logprobs, axis=1)[:, -2:].T
    is_other = other["top_ids"][is_open, 0] != best
    is_close = first - second < CLOSE
    found.different += int((is_other & ~is_close).sum())
    found.close += int((is_other & is_close).sum())


def _map_difference(reference: Array, other: Array, columns: Array) -> float:
    """Return the largest difference within each row's valid columns; the others are undefined."""
    width = min(reference.shape[-1], other.shape[-1])
    is_own = np.arange(width) < columns[:, None, None, None]
    difference = np.abs(other[..., :width].astype(np.float32) - reference[..., :width])
    return float(np.where(is_own, difference, 0.0).max())
