import random

import pytest

from sightline.model.data.learnt_texts import MAX_WORD_BYTES, learnt_texts, read_texts, sample
from sightline.model.data.records import PairRecord
from sightline.model.data.tokenizer_training import MAX_LEARNT_CHARACTERS


def texts_of_random_words(count: int) -> list[str]:
    draw = random.Random(1)
    return [" ".join("".join(draw.choices("abcdefghäö", k=8)) for _ in range(10)) for _ in range(count)]


def word_bytes(texts: list[str]) -> int:
    return sum(len(word.encode()) for word in {word for text in texts for word in text.split()})


def test_few_texts_are_all_learnt_and_not_read_for_it() -> None:
    texts, halvings = learnt_texts(lambda: iter(["a b"]), MAX_WORD_BYTES, seed=1)
    assert (list(texts), halvings) == (["a b"], 0)


def test_the_sample_is_the_largest_whose_different_words_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, limit = texts_of_random_words(1_000), 10_000
    monkeypatch.setattr("sightline.model.data.learnt_texts.MAX_WORD_BYTES", limit)
    learnt, halvings = learnt_texts(lambda: texts, limit + 1, 1)
    assert word_bytes(list(learnt)) <= limit
    assert word_bytes(list(sample(texts, 1, halvings - 1))) > limit
    assert halvings in (3, 4)  # all words have 95,000 bytes


def test_the_sample_depends_on_the_seed_but_not_on_the_order() -> None:
    texts = texts_of_random_words(1_000)
    kept = list(sample(texts, 1, 3))
    assert sorted(sample(reversed(texts), 1, 3)) == sorted(kept)
    assert set(sample(texts, 2, 3)) != set(kept)
    assert 80 < len(kept) < 170  # an eighth


def test_repeated_words_need_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.model.data.learnt_texts.MAX_WORD_BYTES", 10_000)
    texts = texts_of_random_words(100) * 20
    learnt, halvings = learnt_texts(lambda: texts, 10_001, 1)
    assert (list(learnt), halvings) == (texts, 0)


def test_many_different_words_are_sampled() -> None:
    texts = texts_of_random_words(20_000)
    learnt, halvings = learnt_texts(lambda: iter(texts), sum(map(len, texts)), seed=1)
    assert halvings == 1
    assert word_bytes(list(learnt)) <= MAX_WORD_BYTES


def test_long_texts_are_not_learnt() -> None:
    long = "a" * (MAX_LEARNT_CHARACTERS + 1)
    assert list(read_texts([PairRecord("a", long), PairRecord(long[1:], "b")])) == ["a", long[1:], "b"]
