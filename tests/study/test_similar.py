import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.record import Result
from study.served import Served
from study.similar import MODEL, RELATIONS, add_arguments, askable, compare, count, measure, pairs_of, tables

Question = str | tuple[str, ...]


class Known(Served):
    """Knows the neighbours of each question; those of the tokens that are alike are all as near as can be."""

    def __init__(self, answers: Mapping[Question, Sequence[str]], alike: Collection[str] = ()) -> None:
        self._answers = answers
        self._alike = alike

    def post(self, path: str, *bodies: Mapping[str, Any]) -> list[Any]:
        assert path == "/v1/similar"
        return [self._similar(**body) for body in bodies]

    def _similar(self, model: str, top_k: int, token: str = "", analogy: Sequence[str] = ()) -> Any:
        assert model == MODEL
        texts = self._answers[token or tuple(analogy)][:top_k]
        score = 1.0 if token in self._alike else 0.5
        return {"neighbours": [{"id": hash(text), "text": text, "score": score} for text in texts]}


class Splitting(Served):
    """Has a special token, two words and two pieces: one that begins no text, and one that reads like a word."""

    def __init__(self) -> None:
        pass

    def post(self, path: str, *bodies: Mapping[str, Any]) -> list[Any]:
        if path == "/v1/detokenize":
            texts = ["", "dog", "play", "ing", "dog"]
            return [{"texts": [texts[id_] for (id_,) in body["ids"]]} for body in bodies]
        ids = {"dog": [1], "play": [2], "ing": [5, 3]}
        return [{"outputs": [[{"id": id_} for id_ in ids[text]] for text in body["inputs"]]} for body in bodies]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_pieces_do_not_count_as_words_and_the_sixth_place_not_as_found() -> None:
    others = [" one", " two", " three", " four"]
    served = Known(
        {
            ("man", "men", "boy"): [" boys", " girl"],
            ("man", "men", "dog"): [*others, " dogs"],
            ("boy", "boys", "man"): ["men", " girl"],
            ("boy", "boys", "dog"): [*others, " five", " dogs"],
            ("dog", "dogs", "man"): [" girl", " men"],
            ("dog", "dogs", "boy"): [" boys"],
            "man": [*others * 30, " men"],
            "boy": [*others * 20, " boys"],
            "dog": ["dogs"],
        }
    )
    assert count(served, pairs_of("man men, boy boys, dog dogs")) == {
        "relation": ("man", "men"),
        "pairs": 3,
        "near": 1,
        "analogies": 6,
        "first": 2,
        "first_five": 4,
    }


def test_no_word_stands_twice_on_one_side_of_a_relation() -> None:
    for pairs in map(pairs_of, RELATIONS):
        assert len(dict(pairs)) == len(pairs)
        assert all(first != second for first, second in pairs)


def test_tokens_that_no_text_begins_with_are_not_asked_for() -> None:
    assert askable(Splitting(), 5) == ["dog", "play"]


def test_tokens_that_are_like_many_others_count_in_the_mean_alone() -> None:
    same, other, none = ([f" {number}" for number in range(start, start + 10)] for start in (0, 3, 10))
    served = Known({"dog": same, "cat": other, "byte": none})
    exact = Known(dict.fromkeys(["dog", "cat", "byte"], same), alike=["byte"])
    expected = {"tokens": 3, "mean": 5.67, "alike": 1, "fewest": 7}
    assert compare(served, exact, ["dog", "cat", "byte"]) == expected


def test_what_is_not_float32_is_not_compared_with() -> None:
    with pytest.raises(ValueError, match=f"{MODEL} in bundles is int8, not float32"):
        measure(parsed("bundles", "--float32", "bundles"))


def test_without_the_model_nothing_is_measured(bundle: Path) -> None:
    with pytest.raises(ValueError, match=f"has no {MODEL}"):
        measure(parsed(str(bundle.parent)))


def test_tables_have_a_row_for_each_question_and_counts_for_each_relation() -> None:
    shown = [{"text": " dogs", "score": 0.591}, {"text": "hund", "score": 0.5}]
    counts = {"pairs": 3, "near": 2, "analogies": 6, "first": 4, "first_five": 5}
    rows: list[dict[str, Any]] = [
        {"kind": "token", "token": "dog", "neighbours": shown},
        {"kind": "analogy", "analogy": ["boy", "boys", "dog"], "neighbours": shown[:1]},
        {"kind": "relation", "relation": ["man", "men"], **counts},
    ]
    parts = tables(Result(rows=rows))
    assert parts["similar-tokens"].splitlines()[2:] == ["| `dog` | dogs 0.59, `hund` (a piece) 0.50 |"]
    assert parts["similar-analogies"].splitlines()[2:] == ["| boy : boys :: dog : ? | dogs 0.59 |"]
    assert parts["similar-relations"].splitlines()[2:] == ["| man : men | 3 | 2 | 6 | 4 | 5 |"]
    assert "similar-agreement" not in parts
    agreement = {"kind": "agreement", "dtype": "int8", "tokens": 1234, "mean": 9.756, "alike": 12, "fewest": 8}
    sentence = tables(Result(rows=[*rows, agreement]))["similar-agreement"]
    assert sentence.startswith(
        "Of the 10 tokens nearest to a token of the shipped model (int8), 9.8 are those of float32"
    )
    assert sentence.endswith(
        "all 1,234 that can be asked for. Each has at least 8, leaving out 12 whose 10 nearest all "
        "have a cosine above 0.99."
    )
