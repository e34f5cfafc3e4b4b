import base64
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lab.study.context import DISTANCES, influence, senses, uses
from lab.study.served import Served
from sightline.base.text.words import word_spans

Vectors = NDArray[np.float32]


class Encoder:
    """Answers like a service whose tokens are words, after a special token."""

    def __init__(self, encode: Callable[[str, list[str]], Vectors]) -> None:
        """`encode` returns the vectors of the words of a text, (W, D)."""
        self._encode = encode

    def post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        spans = [word_spans(text) for text in body["inputs"]]
        if path == "/v1/tokenize":
            start = {"special": True, "start": 0, "end": 0}
            words = [[{"special": False, "start": one[0], "end": one[1]} for one in each] for each in spans]
            return [{"outputs": [[start, *each] for each in words]}]
        arrays = [
            self._encode(text, [text[start:end] for start, end in each])
            for text, each in zip(body["inputs"], spans, strict=True)
        ]
        arrays = [np.concatenate((np.full((1, array.shape[1]), 9, np.float32), array)) for array in arrays]
        data = [base64.b64encode(array.tobytes()).decode() for array in arrays]
        return [{"embeddings": data, "shapes": [list(array.shape) for array in arrays]}]


def embedding(word: str) -> Vectors:
    return np.random.default_rng(list(word.encode())).standard_normal(64).astype(np.float32)


def with_neighbours(text: str, words: list[str]) -> Vectors:
    own = np.stack([embedding(word) for word in words])
    before, after = np.roll(own, 1, axis=0), np.roll(own, -1, axis=0)
    before[0] = after[-1] = 0
    return own + 0.3 * (before + after)


def test_each_sense_has_four_sentences_with_the_word() -> None:
    every = uses()
    assert len({use.sentence for use in every}) == len(every)
    assert set(Counter((use.word, use.sense) for use in every).values()) == {4}
    assert {use.sense for use in every} == {0, 1}
    for use in every:
        assert use.sentence.rstrip(".").split().count(use.word) == 1


def test_a_change_reaches_only_the_words_whose_vectors_read_it() -> None:
    served = cast("Served", Encoder(with_neighbours))
    row = influence(served, "toy", ["A dog runs, and a cat sleeps on the green sofa.", "Two men sing."])
    near, *far = row["value"][1:]
    assert row["value"][0] == 1 and 0.2 < near < 0.4 and far == [0] * (len(DISTANCES) - 3)
    assert row["interval"][1][0] <= near <= row["interval"][1][1]


def test_senses_are_told_apart_by_the_nearest_vector_of_the_same_word() -> None:
    sense = {use.sentence: use.sense for use in uses()}

    def by_sense(text: str, words: list[str]) -> Vectors:
        return np.array([[1, sense[text]]] * len(words), np.float32)

    def against_sense(text: str, words: list[str]) -> Vectors:
        """Every vector is nearest to one of the other sense."""
        place = [use.sentence for use in uses() if use.word in words].index(text) % 4
        return np.array(
            [[np.cos(place + 0.1 * sense[text]), np.sin(place + 0.1 * sense[text])]] * len(words), np.float32
        )

    right, wrong = (senses(cast("Served", Encoder(encode)), "toy") for encode in (by_sense, against_sense))
    assert right["correct"] == right["total"] == len(uses())
    assert wrong["correct"] == 0
