"""Shares of attention: which words of a translation stand for which words of its source."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sightline.base.text.words import Span

Weights = NDArray[np.float32]


@dataclass(frozen=True)
class Translated:
    """A translated sentence, with attention weights between words at the step that aligns them."""

    text: str
    source_words: Sequence[Span] = ()
    target_words: Sequence[Span] = ()
    weights: Weights = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # (target words, source words)
    is_complete: bool = True  # False if a limit ended the text
    findings: "Findings | None" = None  # what the engine found out beside the text


class Characters(NamedTuple):
    """The characters that a model read or wrote, as parts of a text that has others, too."""

    text: str  # the sentence
    start: int  # of the sentence in the whole text
    spans: Sequence[Span]  # of each character, in the sentence


class Findings(Protocol):
    """Findings of an engine about a sentence, which have positions in what it read and wrote."""

    def placed(self, source: Characters, target: Characters) -> "Findings":
        """Return the findings with positions in the whole texts."""
        ...


class Engine(Protocol):
    """A translation model, as this package needs it."""

    source_language: str  # BCP 47 tags
    target_language: str

    def fits(self, text: str) -> bool:
        """Return False for a text that is too long to be translated."""
        ...

    def unknown(self, text: str) -> Sequence[int]:
        """Return the indices of the characters that the model cannot read."""
        ...

    async def translate(self, sentences: Sequence[str], are_aligned: Sequence[bool]) -> Sequence[Sequence[Translated]]:
        """Return one translation of each sentence or several, some with words and weights."""
        ...


def shared(weights: Weights) -> Weights:
    """Return the geometric means of each weight's share of its row and of its column.

    A source word thus takes part where it has the most of its weight, even if the target words
    there attend more to another word.
    """
    totals = weights.sum(axis=1, keepdims=True) * weights.sum(axis=0, keepdims=True)
    shares: Weights = np.divide(weights, np.sqrt(totals), out=np.zeros_like(weights), where=totals > 0)
    return shares


def share_of(weights: Weights, columns: Iterable[int]) -> NDArray[np.float64]:
    """Return the part of the weights of each row that some columns have."""
    chosen = list(columns)
    totals = weights.sum(axis=1, dtype=np.float64)
    parts = weights[:, chosen].sum(axis=1, dtype=np.float64)
    share: NDArray[np.float64] = np.divide(parts, totals, out=np.zeros_like(parts), where=totals > 0)
    return share


def best_range(values: Sequence[float], start: int, end: int) -> Span | None:
    """Return the range with the largest sum; None if no value is above 0."""
    best, best_sum, first, total = None, 0.0, start, 0.0
    for index in range(start, end):
        if total <= 0:
            first, total = index, 0.0
        total += values[index]
        if total > best_sum + 1e-9:
            best, best_sum = (first, index + 1), total
    return best
