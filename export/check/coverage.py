"""Choice of the cross-attention head that shows omitted source words, for `Manifest.coverage`.

No annotated text is needed. The model translates sentences. Words of other sentences are inserted
into each source, and the same translation is forced again: it certainly omits the inserted words.
The head whose weights tell these words best from all others is chosen, by the half of the sentences
that the model translates with most confidence. The coverage of a source word is the largest weight
that it gets in any decoder step.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import MIN_COVERAGE_AUROC, Coverage
from sightline.base.text.words import Span, coverage_of, is_name, word_spans
from sightline.export.check.alignment import MAX_SENTENCES, Translator, sentences_of
from sightline.export.check.sessions import Sessions

INSERTIONS = 8  # into each sentence
LENGTHS = (1, 1, 3)  # in words, in turn
# Of the sentences, those whose translation has the largest mean log-probability. A model omits
# words of sentences that it does not know; these would count as translated.
CONFIDENT_SHARE = 0.5
MIN_SENTENCES = 10  # even if they are more than this share
RARE_SHARE = 0.05  # of the sentences that may have an inserted word: others are articles and the like
MAX_TRIES = 20  # to find an insertion
# A marked word that the model did translate costs as much as this number of omitted words that are
# not marked, both as shares: about one word of ten is omitted by a model that needs a mark.
COST_OF_MARK = 10
# A word that looks omitted in two sentences and in this share of its occurrences is not marked.
UNTRANSLATED_SHARE = 0.1
MIN_OCCURRENCES = 2
DIGITS = 4


@dataclass(frozen=True)
class Words:
    """Words of sources whose translation was forced, without punctuation marks."""

    texts: Sequence[str]
    weights: NDArray[np.float32]  # (words, L, H)
    are_inserted: NDArray[np.bool_]
    are_changed: NDArray[np.bool_]  # True for all words of a source with an insertion


def choose_coverage(sessions: Sessions, folder: Path, sentences: Sequence[str] = ()) -> Coverage | None:
    """Choose the head that shows omissions; None without cross-attention or a usable sentence.

    `sentences` are as in `choose_alignment`.
    """
    manifest = sessions.manifest
    if manifest.cross_attention is None:
        return None
    words = plant(Translator(sessions, folder), (sentences or sentences_of(manifest))[:MAX_SENTENCES])
    return best_head(words) if words.are_inserted.any() else None


def plant(translator: Translator, sentences: Sequence[str]) -> Words:
    """Translate sentences, and force the translations on the sentences with insertions.

    The words of those that the model translates with most confidence are returned, see
    `CONFIDENT_SHARE`.
    """
    generator, material = np.random.default_rng(0), Material(sentences)
    planted = list[tuple[float, list[tuple[str, NDArray[np.float32], bool, bool]]]]()
    for sentence in sentences:
        variants = [(sentence, (0, 0)), *material.insert_into(sentence, generator)]
        encoded = [translator.encode(text) for text, _ in variants]
        max_new_tokens = min(translator.max_new_tokens(ids) for ids, _ in encoded)
        if len(variants) == 1 or not max_new_tokens:
            continue
        _, logprobs, maps = translator.translate([ids for ids, _ in encoded], max_new_tokens, num_maps=len(variants))
        found = []
        for (_, (start, end)), (_, words), of_source in zip(variants, encoded, maps, strict=True):
            coverage = coverage_of(of_source, [word.tokens for word in words])  # (L, H, words)
            for index, word in enumerate(words):
                if is_name(word.text):
                    found.append((word.text.lower(), coverage[..., index], start <= word.start < end, end > 0))
        planted.append((float(logprobs[0].mean()), found))
    planted.sort(key=itemgetter(0), reverse=True)
    num_kept = max(MIN_SENTENCES, math.ceil(CONFIDENT_SHARE * len(planted)))
    kept = [word for _, found in planted[:num_kept] for word in found]
    texts, weights, inserted, changed = zip(*kept, strict=True) if kept else ((), (), (), ())
    return Words(texts, np.array(weights), np.array(inserted, np.bool_), np.array(changed, np.bool_))


class Material:
    """Words and phrases of sentences, to be inserted into others."""

    def __init__(self, sentences: Sequence[str]) -> None:
        self._sentences = [(sentence, word_spans(sentence)) for sentence in sentences]
        counts = Counter(word for sentence, spans in self._sentences for word in set(_lower(sentence, spans)))
        most = max(1, RARE_SHARE * len(sentences))
        self._rare = {word for word, count in counts.items() if count <= most}

    def insert_into(self, sentence: str, generator: np.random.Generator) -> Iterator[tuple[str, Span]]:
        """Yield the sentence with something inserted between two words, and its character range."""
        spans = word_spans(sentence)
        own, gap = set(_lower(sentence, spans)), " " if " " in sentence else ""
        places = [start for start, _ in spans[1:] if sentence[start - 1].isspace() or not gap]
        for number in range(INSERTIONS if places else 0):
            for _ in range(MAX_TRIES):
                text = self._draw(LENGTHS[number % len(LENGTHS)], own, generator)
                if text:
                    place = places[generator.integers(len(places))]
                    yield sentence[:place] + text + gap + sentence[place:], (place, place + len(text))
                    break

    def _draw(self, length: int, own: set[str], generator: np.random.Generator) -> str:
        """Draw words that follow each other in a sentence: one of them is rare, none is `own`."""
        sentence, spans = self._sentences[generator.integers(len(self._sentences))]
        first = 1 + int(generator.integers(len(spans)))  # the first word may have a capital
        chosen = spans[first : first + length]
        words = _lower(sentence, chosen)
        is_usable = len(chosen) == length and all(map(is_name, words)) and own.isdisjoint(words)
        return sentence[chosen[0][0] : chosen[-1][1]] if is_usable and not self._rare.isdisjoint(words) else ""


def _lower(sentence: str, spans: Sequence[Span]) -> list[str]:
    return [sentence[start:end].lower() for start, end in spans]


def best_head(words: Words) -> Coverage:
    """Return the head whose weights tell inserted words best from others.

    It has a threshold if it is good enough to mark words.
    """
    changed = words.are_changed
    inserted = words.are_inserted[changed]
    scores = {
        (layer, head): auroc(words.weights[changed, layer, head], inserted)
        for layer in range(words.weights.shape[1])
        for head in range(words.weights.shape[2])
    }
    layer, head = max(scores, key=lambda candidate: scores[candidate])
    chosen = Coverage(layer=layer, head=head, auroc=round(scores[layer, head], DIGITS), insertions=int(inserted.sum()))
    return _with_threshold(chosen, words) if chosen.auroc >= MIN_COVERAGE_AUROC else chosen


def _with_threshold(chosen: Coverage, words: Words) -> Coverage:
    """Return a head with its threshold, and what it marks."""
    weights, changed = words.weights[:, chosen.layer, chosen.head], words.are_changed
    untranslated = _untranslated(words, weights)
    kept = np.array([text not in untranslated for text in words.texts])
    found, own = weights[words.are_inserted & kept], weights[~changed & kept]
    # Each threshold is the weight of an inserted word, and marks the smaller ones.
    candidates = np.unique(found).round(DIGITS)
    gains = [(found < limit).mean() - COST_OF_MARK * (own < limit).mean() for limit in candidates]
    threshold = float(candidates[int(np.argmax(gains))])
    num_marked = int((weights[changed & kept] < threshold).sum())
    changes = {
        "threshold": round(threshold, DIGITS),
        "recall": round(float((found < threshold).mean()), DIGITS),
        "precision": round(int((found < threshold).sum()) / max(1, num_marked), DIGITS),
        "marked": round(float((own < threshold).mean()), DIGITS),
        "untranslated": tuple(sorted(untranslated)),
    }
    return chosen.model_copy(update=changes)


def _untranslated(words: Words, weights: NDArray[np.float32]) -> set[str]:
    """Return the words that often have no translation, such as some articles and prepositions."""
    typical = np.median(weights[words.are_inserted])
    own = [(text, low) for text, low in zip(words.texts, weights < typical, strict=True)]
    unchanged = [pair for pair, changed in zip(own, words.are_changed, strict=True) if not changed]
    counts, low = Counter(text for text, _ in unchanged), Counter(text for text, is_low in unchanged if is_low)
    return {text for text, count in low.items() if count >= max(MIN_OCCURRENCES, UNTRANSLATED_SHARE * counts[text])}


def auroc(weights: NDArray[np.float32], are_omitted: NDArray[np.bool_]) -> float:
    """Return the probability that an omitted word has less weight than another; ties count half."""
    others, omitted = np.sort(weights[~are_omitted]), weights[are_omitted]
    if not len(others) or not len(omitted):
        return 0.5
    below = np.searchsorted(others, omitted, "left") + np.searchsorted(others, omitted, "right")
    return float(1 - below.mean() / (2 * len(others)))
