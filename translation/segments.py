"""Sentences of a text that are translated, with their places in it.

All that is between them is copied: blank lines, indentation, the marks of lists, headings, quotes
and tables, code, and sentences without a letter to translate.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from sightline.base.text.sentences import has_letter, split_sentences
from sightline.base.text.words import Span
from sightline.translation.protected import Kept, kept_within

# The marks at the start of a line. Numbers of list items are found by `split_sentences`.
_LINE_START = re.compile(
    r"(?m)^[ \t]*(?:>[ \t]*)*(?:#{1,6}[ \t]+|[-*+•‣◦–—·▪►✓✔☐☑][ \t]+(?:\[[ xX]\][ \t]+)?|={2,6}[ \t]+|-(?=[A-Z]))?"
)
# Symbols between two texts of a line, such as those of a menu: "File → Open", and around headings.
_BETWEEN = re.compile(r"(?<!\S)(?:#+(?=[ \t]*$)|[|·•→⇒▸►]|[*=~_]{2,})(?!\S)", re.MULTILINE)
# Tags of templates that begin or end a branch or a loop, whose text has sentences of its own.
_BRANCH = re.compile(r"\{\{~?(?:[#/^]|else\b)|\{%-?\s*(?:if|el|end|unless|case|for\b)|<%(?![=#-])|\*\|(?:IF|EL|END)")
_TABLE_ROW = re.compile(r"^[ \t]*\|.*\|[ \t]*$", re.MULTILINE)
# Places at which a sentence that is too long is divided, the best first.
_CLAUSES = (
    re.compile(r"[;:—–。；：]\s*"),
    re.compile(r"[,،、，)\]]\s+|[、，]"),
    re.compile(r"\s+"),
    re.compile(r"(?s:.)"),
)


def segments(text: str, kept: Sequence[Kept], language: str, fits: Callable[[str], bool]) -> list[Span]:
    """Return the ranges of the sentences of a text in a language.

    `kept` are parts that are copied, so that no sentence begins or ends inside of one. `fits`
    returns False for a text that is too long for the model; such a sentence is divided.
    """
    plain = _hide(text, kept)
    split = split_sentences(plain, language, max_sentences=len(text) + 1)
    assert split is not None, "no text has more sentences than characters"
    spans, position = [], 0
    for gap, sentence in zip(split.gaps, split.sentences, strict=False):
        start = position + len(gap)
        position = start + len(sentence)
        spans += [span for span in _trimmed(text, start, position, kept) if has_words(text, *span, kept)]
    return [part for span in spans for part in _divided(text, *span, kept, fits) if has_words(text, *part, kept)]


def _hide(text: str, kept: Sequence[Kept]) -> str:
    """Return a text of the same length that splits into sentences as it should.

    What is kept becomes a word, or space if it has several lines. Marks of lines become spaces.
    """
    parts, position = [], 0
    for span in kept:
        parts.append(text[position : span.start])
        own, size = text[span.start : span.end], span.end - span.start
        has_lines = own.isspace() or not {*own}.isdisjoint("\r\n")
        is_border = has_lines or _BETWEEN.match(text, span.start) or _BRANCH.match(own)
        parts.append("\n" * size if is_border else "X" + "x" * (size - 1) if size > 1 else "5")
        position = span.end
    plain = "".join([*parts, text[position:]]).replace("\t", "\n")  # a tab is between two cells
    plain = _TABLE_ROW.sub(lambda row: re.sub(r"(?<!\\)\|", "\n", row[0]), plain)
    plain = _BETWEEN.sub(lambda between: "\n" * len(between[0]), plain)
    return _LINE_START.sub(lambda start: " " * len(start[0]), plain)


def _trimmed(text: str, start: int, end: int, kept: Sequence[Kept]) -> Iterator[Span]:
    """Yield a sentence without the symbols at its ends, such as emoji: they are no part of it."""
    inside = kept_within(kept, start, end)
    while inside and inside[0].is_symbol and inside[0].start == start:
        start = inside.pop(0).end
        most = inside[0].start if inside else end
        start += len(text[start:most]) - len(text[start:most].lstrip())
    while inside and inside[-1].is_symbol and inside[-1].end == end:
        end = inside.pop().start
        least = inside[-1].end if inside else start
        end -= len(text[least:end]) - len(text[least:end].rstrip())
    if start < end:
        yield start, end


def has_words(text: str, start: int, end: int, kept: Sequence[Kept]) -> bool:
    """Return True if there is a letter to translate."""
    position = start
    for span in kept_within(kept, start, end):
        if has_letter(text[position : span.start]):
            return True
        position = span.end
    return has_letter(text[position:end])


def _divided(text: str, start: int, end: int, kept: Sequence[Kept], fits: Callable[[str], bool]) -> list[Span]:
    """Divide a sentence until each part fits."""
    waiting, done = [(start, end)], []
    while waiting:
        start, end = waiting.pop()
        if end - start < 2 or fits(text[start:end]):
            done.append((start, end))
            continue
        left, right = divide(text, start, end, kept)
        if left == (start, end):  # what is kept cannot be divided
            done.append(left)
        else:
            waiting += [right, left]
    return done


def divide(text: str, start: int, end: int, kept: Sequence[Kept]) -> tuple[Span, Span]:
    """Divide a sentence near its middle: between clauses if possible, else between words.

    The space there belongs to neither part. Nothing that is kept is divided.
    """
    inside, quarter = kept_within(kept, start, end), (end - start) // 4
    for pattern in _CLAUSES:
        margin = 0 if pattern is _CLAUSES[-1] else quarter if pattern is not _CLAUSES[-2] else 1
        ends = [match.end() for match in pattern.finditer(text, start + margin, end - margin)]
        ends = [place for place in ends if start < place < end and not any(s.start < place < s.end for s in inside)]
        if ends:
            place = min(ends, key=lambda place: abs(2 * place - start - end))
            least = max([start, *[span.end for span in inside if span.end <= place]])
            first_end = place - (len(text[least:place]) - len(text[least:place].rstrip()))
            return (start, max(first_end, start + 1)), (place, end)
    return (start, end), (end, end)
