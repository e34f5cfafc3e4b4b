"""Words of a text, the tokens of each word, and attention maps of words.

`sightline.export.check.alignment` uses the same functions, so that a choice that it measures holds
in the service.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]  # index of the first character, and index after the last one

# Punctuation marks that belong to a word between two letters or digits, and between two digits.
INNER_MARKS = frozenset("'’-‐‑.·_@&׳״")  # don't, well-known, e.g, l·l, צה״ל
INNER_MARKS_OF_NUMBERS = frozenset(",:/")  # 1,000 and 12:30
# A character of a script that writes no space between words: of Thai, Lao, Burmese, Khmer, Kana,
# Bopomofo and Han.
UNSPACED = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u3005-\u3007\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
FIRST_IDEOGRAPH = 0x3000


class Word(NamedTuple):
    """A word of a text."""

    text: str
    start: int  # index of its first character
    end: int  # index after its last character
    tokens: tuple[int, ...]  # indices of its tokens, in ascending order


class _Kinds(dict[int, str]):
    """Kind of each character by its code, for `WORD`; those of the scripts with spaces are kept."""

    def __missing__(self, code: int) -> str:
        kind = _kind_of(chr(code))
        if code < FIRST_IDEOGRAPH:
            self[code] = kind
        return kind


def _kind_of(character: str) -> str:
    category = unicodedata.category(character)[0]
    if character.isspace():
        return " "
    if category == "M":
        return "m"  # a combining mark
    if re.match(UNSPACED, character):
        return "c"
    if category == "P":
        return "'" if character in INNER_MARKS else "," if character in INNER_MARKS_OF_NUMBERS else "!"
    return "0" if character.isdigit() else "a" if category in "LN" else "$"


KINDS = _Kinds()
# A word, in the kinds of the characters of a text.
WORD = re.compile(r"[a0m$]+(?:(?:(?<=[a0m])'(?=[a0m])|(?<=0),(?=0))[a0m$]+)*|[c',!]m*")


def word_spans(text: str) -> list[Span]:
    """Return the character ranges of the words of a text.

    A word is a maximal run of characters that are not whitespace, without punctuation marks. Each
    punctuation mark is a word of its own, except for the apostrophe in "don't", the hyphen in
    "well-known", the point in "3.5" and similar marks inside of words. In scripts without spaces,
    such as Chinese and Japanese, each character is a word here; `words_of` joins those that a token
    covers.
    """
    return [match.span() for match in WORD.finditer(text.translate(KINDS))]


def is_name(word: str) -> bool:
    """Return True if a word has a letter or a digit, so that it is no punctuation mark."""
    return word.isalnum() or any(map(str.isalnum, word))  # most words have nothing else


def words_of(text: str, spans: Sequence[Span | None]) -> list[Word]:
    """Return the words of a text that have tokens, in the order of the text.

    A token belongs to the word whose characters it covers. If it covers characters of several words
    of `word_spans`, they are one word. A token that covers only whitespace, or nothing, belongs to
    the word of the next token, at the end of the text to the last word. Special tokens, whose span
    is None, belong to no word. Spans are in ascending order and may include whitespace. Tokens that
    share a character have it in both spans.
    """
    end_of_text = len(text) + 1
    parts = [*word_spans(text), (end_of_text, end_of_text)]
    words: list[list[Any]] = []  # first and last part, and tokens
    waiting: list[int] = []  # tokens without visible characters, before the next word
    first = 0  # part at the start of a token, or the next one
    for token, span in enumerate(spans):
        if span is None:
            continue
        waiting.append(token)
        start, end = span
        while parts[first][1] <= start:
            first += 1
        if start == end or parts[first][0] >= end:
            continue
        last = first
        while parts[last + 1][0] < end:
            last += 1
        if words and first <= words[-1][1]:
            words[-1][1] = max(words[-1][1], last)
            words[-1][2] += waiting
        else:
            words.append([first, last, waiting])
        waiting = []
    if words:
        words[-1][2] += waiting
    found = [(parts[first][0], parts[last][1], tokens) for first, last, tokens in words]
    return [Word(text[start:end], start, end, tuple(tokens)) for start, end, tokens in found]


def rows_that_read(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return attention maps whose row t is that of the decoder step that reads target token t.

    That step writes token t + 1; in the given maps (..., rows, columns), row t is that of the step
    that writes token t. No step reads the last token, and its weights are 0.
    """
    return np.concatenate([maps[..., 1:, :], np.zeros_like(maps[..., :1, :])], axis=-2)


def coverage_of(maps: NDArray[np.float32], words: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the coverage (..., words) of source words from maps (..., T, S) of tokens.

    It is the largest weight that a word gets in any step, as the sum over its tokens. A word
    without a translation has a small one. The tokens between the first word and the end of the
    last one all belong to words.
    """
    if not words:
        return np.zeros((*maps.shape[:-2], 0), np.float32)
    starts = [tokens[0] for tokens in words]
    coverage: NDArray[np.float32] = np.add.reduceat(maps[..., : words[-1][-1] + 1], starts, axis=-1).max(-2, initial=0)
    return coverage


def merge_weights(
    maps: NDArray[np.float32],
    rows: Sequence[Sequence[int]] | None = None,
    columns: Sequence[Sequence[int]] | None = None,
) -> NDArray[np.float32]:
    """Return attention maps of words from maps (..., rows, columns) of tokens.

    The weight to a word is the sum over its tokens, and the weight from a word is the mean over its
    tokens (Clark et al. 2019, "What Does BERT Look At?", section 4.1). Tokens that belong to no
    word are left out, and the rest is not normalized again. `rows` and `columns` are the indices of
    each word's tokens; None keeps those of the tokens.
    """
    if columns is not None:
        merged = np.empty((*maps.shape[:-1], len(columns)), np.float32)
        for word, tokens in enumerate(columns):
            merged[..., word] = maps[..., list(tokens)].sum(axis=-1)
        maps = merged
    if rows is not None:
        merged = np.empty((*maps.shape[:-2], len(rows), maps.shape[-1]), np.float32)
        for word, tokens in enumerate(rows):
            merged[..., word, :] = maps[..., list(tokens), :].mean(axis=-2)
        maps = merged
    return maps
