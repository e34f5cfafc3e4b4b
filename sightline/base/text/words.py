"""Words of a text, the tokens of each word, and attention maps of words.

`sightline.export.check.alignment` uses the same functions, so that a choice that it measures holds
in the service.
"""

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]  # index of the first character, and index after the last one

# Punctuation marks that belong to a word between two letters or digits, and between two digits.
INNER_MARKS = frozenset("'’-‐‑.·_@&׳״")  # don't, well-known, e.g, l·l, צה״ל
INNER_MARKS_OF_NUMBERS = frozenset(",:/")  # 1,000 and 12:30
# Blocks of scripts that write no space between words, as ranges of code points.
SCRIPTS_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # marks that are read as ideographs
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3100, 0x312F),  # Bopomofo
    (0x31F0, 0x31FF),  # Katakana
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han
    (0xFF66, 0xFF9F),  # Katakana
    (0x20000, 0x3FFFF),  # Han
)


FIRST_WITHOUT_SPACES = chr(SCRIPTS_WITHOUT_SPACES[0][0])


class Word(NamedTuple):
    """A word of a text."""

    text: str
    start: int  # index of its first character
    end: int  # index after its last character
    tokens: tuple[int, ...]  # indices of its tokens, in ascending order


def word_spans(text: str) -> list[Span]:
    """Return the character ranges of the words of a text.

    A word is a maximal run of characters that are not whitespace, without punctuation marks. Each
    punctuation mark is a word of its own, except for the apostrophe in "don't", the hyphen in
    "well-known", the point in "3.5" and similar marks inside of words. In scripts without spaces,
    such as Chinese and Japanese, each character is a word here; `words_of` joins those that a token
    covers.
    """
    spans: list[Span] = []
    continues = False  # True if a letter or digit continues the last word
    for index, character in enumerate(text):
        if continues and character.isalnum() and character < FIRST_WITHOUT_SPACES:  # most characters
            spans[-1] = spans[-1][0], index + 1
            continue
        if character.isspace():
            continues = False
            continue
        is_punctuation = unicodedata.category(character)[0] == "P" and not (continues and _is_inside(text, index))
        is_word = is_punctuation or _is_of_script_without_spaces(character)
        if (continues and not is_word) or (spans and _combines(text, index, spans[-1])):
            spans[-1] = spans[-1][0], index + 1
        else:
            spans.append((index, index + 1))
            continues = not is_word
    return spans


def is_name(word: str) -> bool:
    """Return True if a word has a letter or a digit, so that it is no punctuation mark."""
    return any(map(str.isalnum, word))


def _is_inside(text: str, index: int) -> bool:
    """Return True if a punctuation mark is part of the word around it."""
    before, after = text[index - 1], text[index + 1 : index + 2]
    if text[index] in INNER_MARKS_OF_NUMBERS:
        return before.isdigit() and after.isdigit()
    return text[index] in INNER_MARKS and bool(after) and _is_letter(before) and _is_letter(after)


def _is_letter(character: str) -> bool:
    """Return True for letters, digits and combining marks of scripts with spaces."""
    return unicodedata.category(character)[0] in "LNM" and not _is_of_script_without_spaces(character)


def _is_of_script_without_spaces(character: str) -> bool:
    code = ord(character)
    return character >= FIRST_WITHOUT_SPACES and any(first <= code <= last for first, last in SCRIPTS_WITHOUT_SPACES)


def _combines(text: str, index: int, last: Span) -> bool:
    """Return True if a character is a combining mark of the word that ends before it."""
    return last[1] == index and unicodedata.category(text[index])[0] == "M"


def words_of(text: str, spans: Sequence[Span | None]) -> list[Word]:
    """Return the words of a text that have tokens, in the order of the text.

    A token belongs to the word whose characters it covers. If it covers characters of several words
    of `word_spans`, they are one word. A token that covers only whitespace, or nothing, belongs to
    the word of the next token, at the end of the text to the last word. Special tokens, whose span
    is None, belong to no word. Spans are in ascending order and may include whitespace. Tokens that
    share a character have it in both spans.
    """
    parts = word_spans(text)
    starts, ends = [start for start, _ in parts], [end for _, end in parts]
    # The parts of which each token covers characters.
    covered = [range(0) if span is None else _overlapping(starts, ends, *span) for span in spans]
    joined = {part for token_parts in covered for part in token_parts[1:]}  # parts of the same word as the part before
    word_at: list[int] = []  # index of the first part of the word, by part
    for part in range(len(parts)):
        word_at.append(word_at[-1] if part in joined else part)
    tokens: dict[int, list[int]] = {}
    invisible: list[int] = []  # tokens without visible characters whose next word is not known yet
    for token, (own, span) in enumerate(zip(covered, spans, strict=True)):
        if own:
            tokens.setdefault(word_at[own[0]], []).extend([*invisible, token])
            invisible.clear()
        elif span is not None:
            invisible.append(token)
    if tokens:
        tokens[max(tokens)] += invisible
    end_of = {word: end for word, (_, end) in zip(word_at, parts, strict=True)}  # of its last part
    return [
        Word(text[parts[word][0] : end_of[word]], parts[word][0], end_of[word], tuple(sorted(tokens[word])))
        for word in sorted(tokens)
    ]


def _overlapping(starts: Sequence[int], ends: Sequence[int], start: int, end: int) -> range:
    """Return the indices of the ranges that share characters with a range."""
    return range(bisect_right(ends, start), bisect_left(starts, end)) if start < end else range(0)


def rows_that_read(maps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return attention maps whose row t is that of the decoder step that reads target token t.

    That step writes token t + 1; in the given maps (..., rows, columns), row t is that of the step
    that writes token t. No step reads the last token, and its weights are 0.
    """
    return np.concatenate([maps[..., 1:, :], np.zeros_like(maps[..., :1, :])], axis=-2)


def coverage_of(maps: NDArray[np.float32], words: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the coverage (..., words) of source words from maps (..., T, S) of tokens.

    It is the largest weight that a word gets in any step, as the sum over its tokens. A word
    without a translation has a small one.
    """
    tokens = np.fromiter(chain.from_iterable(words), np.intp)
    membership = np.zeros((maps.shape[-1], len(words)), np.float32)
    membership[tokens, np.repeat(np.arange(len(words)), np.fromiter(map(len, words), np.intp))] = 1
    coverage: NDArray[np.float32] = (maps @ membership).max(axis=-2, initial=0)
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
