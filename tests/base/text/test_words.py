"""Words of texts and of tokens, and the merged maps, each compared with a slow reference."""

import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sightline.base.text.tokenizer import Offsets, TextTokenizer
from sightline.base.text.words import merge_weights, word_spans, words_of
from tests.base.text.kinds import KINDS
from tests.support.tables import read_table

TOKENIZERS = {name: TextTokenizer(Tokenizer.from_str(make().to_str())) for name, make in KINDS.items()}
TEXTS = (
    "A man in a red jacket doesn't ski.",
    "„Warte!“, ruft Zoë (7 Jahre alt).",
    "It costs 3,141.50 at 12:30 - well-known, isn't it?",
    "Hi 👩‍👩‍👧 and 🙂🙂!",
    "我哥哥上个星期买了一辆红色的汽车。",
    "子供たちはテレビを見ています。",
    "أين تركت مفاتيح البيت؟",
    "צה״ל, ישראל",
    "मैं हिन्दी बोलता हूँ।",
    "ฉันกินข้าว",
    "다람쥐 헌 쳇바퀴에",
    "  two\n\nlines\t",
)
FUZZ = settings(deadline=None, derandomize=True, max_examples=20)
ALPHABET = "ab Z9ß.,'-:!?(🙂é\u0301中のท่ש״\n\t"
FUZZED_TEXTS = st.one_of(st.text(ALPHABET, max_size=30), st.sampled_from(TEXTS), st.text(max_size=12))
WITHOUT_SPACES = ("CJK UNIFIED", "HIRAGANA", "KATAKANA", "THAI", "LAO", "MYANMAR", "KHMER", "BOPOMOFO")


def texts_of(text: str) -> list[str]:
    return [text[start:end] for start, end in word_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    read_table(__file__),
)
def test_words_of_a_text(text: str, expected: list[str]) -> None:
    assert texts_of(text) == expected


@FUZZ
@given(text=FUZZED_TEXTS)
def test_words_are_disjoint_and_cover_all_visible_characters(text: str) -> None:
    spans = word_spans(text)
    covered = [index for span in spans for index in range(*span)]
    assert covered == [index for index, character in enumerate(text) if not character.isspace()]
    assert all(start < end for start, end in spans)


# Words of tokens


def slow_groups(text: str, offsets: Offsets) -> list[set[int]]:
    """Return the tokens of each word: tokens are joined while they share a part of the text."""
    groups: list[tuple[set[int], set[int]]] = []  # tokens, and indices of parts
    pending: set[int] = set()
    for token, span in enumerate(offsets):
        if span is None:
            continue
        parts = {
            number
            for number, (start, end) in enumerate(word_spans(text))
            if any(start <= index < end for index in range(*span))
        }
        if not parts:
            pending.add(token)
            continue
        tokens = {token} | pending
        pending = set()
        for group in [one for one in groups if one[1] & parts]:
            groups.remove(group)
            tokens, parts = tokens | group[0], parts | group[1]
        groups.append((tokens, parts))
    groups.sort(key=lambda one: min(one[1]))
    if groups:
        groups[-1][0].update(pending)
    return [tokens for tokens, _ in groups]


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(text=FUZZED_TEXTS)
def test_tokens_are_grouped_as_by_the_slow_twin(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids)
    for given_text, offsets in ((text, tokenizer.offsets(text, len(ids))), (decoded, tokenizer.decoded_offsets(ids))):
        assert len(offsets) == len(ids)
        words = words_of(given_text, offsets)
        assert [set(word.tokens) for word in words] == slow_groups(given_text, offsets)
        for word in words:
            assert word.text == given_text[word.start : word.end] == word.text.strip() != ""
            assert list(word.tokens) == sorted(word.tokens)
        grouped = sorted(token for word in words for token in word.tokens)
        if words:
            assert grouped == [token for token, span in enumerate(offsets) if span is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_words_with_spaces_do_not_depend_on_the_tokenizer(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    if any(unicodedata.name(character, "").startswith(WITHOUT_SPACES) for character in text):
        return
    ids = tokenizer.encode(text)
    found = [word.text for word in words_of(text, tokenizer.offsets(text, len(ids)))]
    assert "".join(found) == "".join(texts_of(text))
    # Unknown tokens of the other kinds may cover several words.
    if kind.startswith(("byte-level", "word piece")):
        assert found == texts_of(text)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("word piece")])
def test_tokens_of_chinese_are_words_of_their_own(kind: str) -> None:
    tokenizer, text = TOKENIZERS[kind], "红色的车"
    ids = tokenizer.encode(text)
    words = words_of(text, tokenizer.offsets(text, len(ids)))
    assert "".join(word.text for word in words) == text
    # Bytes of one character belong to one word.
    assert len(words) == len({word.start for word in words}) >= 1


def offsets_of(*spans: tuple[int, int] | None) -> Offsets:
    return list(spans)


@pytest.mark.parametrize(
    ("text", "offsets", "expected"),
    [
        ("don't", offsets_of((0, 3), (3, 5), None), [("don't", (0, 1))]),
        ("a cat.", offsets_of(None, (0, 1), (1, 5), (5, 6)), [("a", (1,)), ("cat", (2,)), (".", (3,))]),
        ("of the cat", offsets_of((0, 6), (6, 10)), [("of the", (0,)), ("cat", (1,))]),
        ("x 🙂", offsets_of((0, 1), (1, 3), (2, 3), (2, 3)), [("x", (0,)), ("🙂", (1, 2, 3))]),
        ("中文", offsets_of((0, 2)), [("中文", (0,))]),
        ("中文", offsets_of((0, 0), (0, 1), (1, 2)), [("中", (0, 1)), ("文", (2,))]),
        ("a \n b ", offsets_of((0, 1), (1, 3), (3, 5), (5, 6)), [("a", (0,)), ("b", (1, 2, 3))]),
        ("a b", offsets_of((0, 1)), [("a", (0,))]),
        ("a", offsets_of(None), []),
        ("", offsets_of((0, 0), None), []),
    ],
)
def test_words_of_given_ranges(text: str, offsets: Offsets, expected: list[tuple[str, tuple[int, ...]]]) -> None:
    assert [(word.text, word.tokens) for word in words_of(text, offsets)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_special_token_in_a_text_is_plain_text(kind: str) -> None:
    tokenizer, text = TOKENIZERS[kind], "a </s> b"
    offsets = tokenizer.offsets(text, len(tokenizer.encode(text)))
    assert "".join(word.text for word in words_of(text, offsets)) == "a</s>b"


def test_parts_of_an_input_are_separated_by_their_special_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("a man", "sings"))
    special = next(iter(sorted(tokenizer.special_ids)))
    ids = [special, *first, special, special, *second, special]
    text, offsets = tokenizer.decode_parts(ids)
    assert text.split() == ["a", "man", "sings"]
    assert [word.text for word in words_of(text, offsets)] == ["a", "man", "sings"]
    assert [token for token, one in enumerate(offsets) if one is None] == [
        token for token, id_ in enumerate(ids) if id_ == special
    ]


# Weights of words


def slow_weights(
    maps: Any, rows: Sequence[Sequence[int]] | None, columns: Sequence[Sequence[int]] | None
) -> list[list[float]]:
    """Return one map of words, with a sum over columns and a mean over rows, in float64."""
    num_rows, num_columns = maps.shape
    rows = [[row] for row in range(num_rows)] if rows is None else rows
    columns = [[column] for column in range(num_columns)] if columns is None else columns
    return [[sum(sum(float(maps[i, j]) for j in column) for i in row) / len(row) for column in columns] for row in rows]


@pytest.mark.parametrize("rows", [None, [(0,), (1, 2)], [(2, 0), (1,), (3,)], []])
@pytest.mark.parametrize("columns", [None, [(0, 1, 2), (4,)], [(3, 1)], []])
def test_weights_of_words_equal_the_slow_twin(rows: Any, columns: Any) -> None:
    generator = np.random.default_rng(1)
    maps = generator.random((2, 3, 4, 5), np.float32)
    found = merge_weights(maps, rows, columns)
    assert found.dtype == np.float32
    for layer in range(2):
        for head in range(3):
            expected = np.array(slow_weights(maps[layer, head], rows, columns), np.float64)
            # Fewer than 16 additions of numbers below 1: each rounds by at most 2^-24 of a sum
            # below 16.
            np.testing.assert_allclose(
                found[layer, head].reshape(expected.shape), expected, rtol=0, atol=16 * 16 * 2.0**-24
            )


def test_weights_of_all_words_sum_to_the_weights_of_tokens_that_are_not_special() -> None:
    tokenizer, text = TOKENIZERS["metaspace"], TEXTS[0]
    ids = tokenizer.encode(text)
    offsets = tokenizer.offsets(text, len(ids))
    groups = [word.tokens for word in words_of(text, offsets)]
    kept = [token for token, one in enumerate(offsets) if one is not None]
    maps = np.random.default_rng(2).dirichlet(np.ones(len(ids)), len(ids)).astype(np.float32)
    merged = merge_weights(maps, None, groups)
    np.testing.assert_allclose(merged.sum(axis=-1), maps[:, kept].sum(axis=-1), rtol=len(ids) * 2.0**-23)
