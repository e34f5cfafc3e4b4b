"""Word alignment by the statistics of many pairs of sentences, without a translation model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.study.word_links import Links

ROUNDS = 8
SHARPNESS = 4.0  # of the preference for words at the same relative position
NO_SOURCE = 0.08  # probability of a word without a source word
LEAST = 0.01  # pseudo-count of each pair of words
Words = Sequence[str]
Array = NDArray[Any]


def align(pairs: Sequence[tuple[Words, Words]]) -> list[Links]:
    """Return the links of each pair that the alignments of both directions have.

    A direction is model 1 of IBM with a preference for the diagonal (Dyer et al. 2013), trained by
    expectation maximization on all pairs. Case is ignored.
    """
    forward = _directed([(source, target) for source, target in pairs])
    backward = _directed([(target, source) for source, target in pairs])
    return [
        frozenset((source, target) for target, source in enumerate(ahead) if source >= 0 and back[source] == target)
        for ahead, back in zip(forward, backward, strict=True)
    ]


def _directed(pairs: Sequence[tuple[Words, Words]]) -> list[Array]:
    """Return the index of the source word of each target word; -1 for none."""
    ids: dict[str, int] = {"": 0}  # stands for no source word
    keys, priors, sizes = list[Array](), list[Array](), list[int]()
    for pair in pairs:
        source, target = (np.array([ids.setdefault(word.lower(), len(ids)) for word in words]) for words in pair)
        rows, columns = len(target), len(source)
        keys.append(((target[:, None] << 32) + np.append(0, source)).ravel())
        places = [(np.arange(size) + 0.5) / max(size, 1) for size in (rows, columns)]
        near = np.exp(-SHARPNESS * np.abs(places[0][:, None] - places[1]))
        near *= (1 - NO_SOURCE) / near.sum(axis=1, keepdims=True)
        priors.append(np.hstack([np.full((rows, 1), NO_SOURCE), near]).ravel())
        sizes += [columns + 1] * rows
    cells, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    prior, starts = np.concatenate(priors), np.cumsum([0, *sizes[:-1]])
    sources, probability = cells & (1 << 32) - 1, np.ones(len(cells))
    for _ in range(ROUNDS):
        scores = prior * probability[inverse]
        scores /= np.repeat(np.add.reduceat(scores, starts), sizes)
        counts = np.bincount(inverse, scores, len(cells)) + LEAST
        probability = counts / np.bincount(sources, counts)[sources]
    scores = prior * probability[inverse]
    best = [int(scores[start : start + size].argmax()) - 1 for start, size in zip(starts, sizes, strict=True)]
    return np.split(np.array(best), np.cumsum([len(target) for _, target in pairs])[:-1])
