from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lab.study.served import Served
from lab.study.similar import MODEL, RELATIONS, compare, count, pairs_of, queryable_tokens

Question = str | tuple[str, ...]


class Known(Served):
    """A service that knows the neighbours of each query; those of tokens in `alike` all have a
    cosine of 1.
    """

    def __init__(self, neighbours: Mapping[Question, Sequence[str]], alike: Collection[str] = ()) -> None:
        self._neighbours = neighbours
        self._alike = alike

    def post(self, path: str, *bodies: Mapping[str, Any]) -> list[Any]:
        assert path == "/v1/similar"
        return [self._similar(**body) for body in bodies]

    def _similar(self, model: str, top_k: int, token: str = "", analogy: Sequence[str] = ()) -> Any:
        assert model == MODEL
        texts = self._neighbours[token or tuple(analogy)][:top_k]
        score = 1.0 if token in self._alike else 0.5
        return {"neighbours": [{"id": hash(text), "text": text, "score": score} for text in texts]}


class Splitting(Served):
    """A service with a special token, two words and two pieces: one inside words, one that reads
    like a word.
    """

    def __init__(self) -> None:
        pass

    def post(self, path: str, *bodies: Mapping[str, Any]) -> list[Any]:
        if path == "/v1/detokenize":
            texts = ["", "dog", "play", "ing", "dog"]
            return [{"texts": [texts[id_] for (id_,) in body["ids"]]} for body in bodies]
        ids = {"dog": [1], "play": [2], "ing": [5, 3]}
        return [{"outputs": [[{"id": id_} for id_ in ids[text]] for text in body["inputs"]]} for body in bodies]


def test_pieces_are_not_words_and_the_sixth_result_does_not_count() -> None:
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


def test_relations_have_no_duplicate_words() -> None:
    for pairs in map(pairs_of, RELATIONS):
        assert len(dict(pairs)) == len(pairs)
        assert all(first != second for first, second in pairs)


def test_tokens_that_start_no_text_are_not_queried() -> None:
    assert queryable_tokens(Splitting(), 5) == ["dog", "play"]


def test_tokens_with_many_near_equals_count_only_in_the_mean() -> None:
    same, other, none = ([f" {number}" for number in range(start, start + 10)] for start in (0, 3, 10))
    served = Known({"dog": same, "cat": other, "byte": none})
    exact = Known(dict.fromkeys(["dog", "cat", "byte"], same), alike=["byte"])
    expected = {"tokens": 3, "mean": 5.67, "alike": 1, "fewest": 7}
    assert compare(served, exact, ["dog", "cat", "byte"]) == expected
