"""A translation model without weights: it changes words in a known way, and aligns them exactly."""

from collections.abc import Callable, Sequence

import numpy as np

from sightline.base.text.words import Span, word_spans
from sightline.translation.alignment import Translated

Order = Callable[[int], Sequence[int]]  # the source words of the target, by their number


def same_order(size: int) -> Sequence[int]:
    return range(size)


def reversed_order(size: int) -> Sequence[int]:
    """Return all words in reverse order, with the mark at the end."""
    return [*range(size - 2, -1, -1), *range(max(size - 1, 0), size)]


class FakeEngine:
    """Writes words in upper case and in another order; `lost` words have no translation."""

    source_language, target_language = "en", "de"

    def __init__(self, order: Order = same_order, lost: Sequence[str] = (), max_characters: int = 10_000) -> None:
        self.order, self.lost, self.max_characters = order, lost, max_characters
        self.read: list[str] = []

    def fits(self, text: str) -> bool:
        return len(text) <= self.max_characters

    def unknown(self, text: str) -> Sequence[int]:
        return [index for index, character in enumerate(text) if character in "ħ“”’"]

    async def translate(self, sentences: Sequence[str], are_aligned: Sequence[bool]) -> Sequence[list[Translated]]:
        self.read += sentences
        return [[self._translated(sentence)] for sentence in sentences]

    def _translated(self, sentence: str) -> Translated:
        words = word_spans(sentence)
        chosen = [index for index in self.order(len(words)) if sentence[slice(*words[index])] not in self.lost]
        text, targets = "", list[Span]()
        weights = np.full((len(chosen), len(words)), 0.01, np.float32)
        for row, index in enumerate(chosen):
            word = sentence[slice(*words[index])]
            text += " " * (bool(text) and any(map(str.isalnum, word)))
            targets.append((len(text), len(text) + len(word)))
            text += word.upper()
            weights[row, index] = 0.9
        return Translated(text, words, targets, weights)
