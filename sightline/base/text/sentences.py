"""Sentences of a text, found by the `sentencex` library, and the exact text between them:
whitespace, and the numbers of list items.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sentencex

# The time of `sentencex` grows with the square of the length for some texts, and it blocks all
# threads. Therefore it receives at most this many characters at once.
WINDOW_CHARACTERS = 2048
# Languages that write no space between sentences.
LANGUAGES_WITHOUT_SPACES = frozenset({"ja", "km", "lo", "my", "th", "zh"})
_WHITESPACE = re.compile(r"\s")
# A number or letter of a list item, such as "1.", "2.3.", "a)" or "(iv)". It belongs to the
# sentence after it.
_LIST_MARKER = re.compile(r"\(?(\d{1,3}(\.\d{1,3})*|[^\W\d_]|[ivxIVX]{2,5})[.)]\.?")
# A list marker that is copied, because models read a number as a count. A single letter with a
# period stays with its sentence, because it may be an initial: "J. Smith sleeps."
_COPIED_MARKER = re.compile(r"(\(?\d{1,3}(\.\d{1,3})*[.)]\.?|\(?([^\W\d_]|[ivxIVX]{2,5})\))\s+(?=\S)")


@dataclass(frozen=True)
class SplitText:
    """A text as a list of sentences and the text around them."""

    sentences: Sequence[str]  # without whitespace at either end
    gaps: Sequence[str]  # whitespace and list markers; gaps[i] precedes sentence i; one more gap ends the text

    def join(self, sentences: Sequence[str], language: str) -> str:
        """Replace each sentence and keep the gaps.

        Args:
            sentences: replacement of each sentence.
            language: language of the replacements. A space is inserted between two sentences
                without a gap, unless this language writes none.
        """
        separator = "" if language.partition("-")[0] in LANGUAGES_WITHOUT_SPACES else " "
        parts = [self.gaps[0]]
        for sentence, gap in zip(sentences, self.gaps[1:], strict=True):
            parts += sentence, gap or separator
        if not self.gaps[-1]:
            parts.pop()
        return "".join(parts)


def split_sentences(text: str, language: str, max_sentences: int) -> SplitText | None:
    """Split a text into sentences. A line break always ends a sentence.

    Args:
        text: the text.
        language: BCP 47 tag of its language; for an unknown one, general rules are used.
        max_sentences: maximum number of sentences.

    Returns:
        The sentences and gaps; None if there are more than `max_sentences`.
    """
    language = language.partition("-")[0]  # `sentencex` knows ISO 639 codes
    sentences: list[str] = []
    gaps: list[str] = []
    position = gap_start = 0
    for segment in _segments(text, language):
        sentence = segment.strip()
        if sentence:
            if len(sentences) == max_sentences:
                return None
            start = position + len(segment) - len(segment.lstrip())
            if marker := _COPIED_MARKER.match(sentence):
                start, sentence = start + marker.end(), sentence[marker.end() :]
            gaps.append(text[gap_start:start])
            sentences.append(sentence)
            gap_start = start + len(sentence)
        position += len(segment)
    gaps.append(text[gap_start:])
    return SplitText(sentences, gaps)


def _segments(text: str, language: str) -> Iterator[str]:
    """Yield blank lines, and sentences with the whitespace around them, in order."""
    for line in text.splitlines(keepends=True):
        if line.isspace():
            yield line
            continue
        start = position = 0  # of the current sentence; of the next window
        while position < len(line):
            window = line[position : position + WINDOW_CHARACTERS]
            is_last = position + len(window) == len(line)
            lengths = _segment_lengths(window, language)
            if not is_last:
                lengths.pop()  # the window may have cut this sentence
            for length in lengths:
                position += length
                if position < len(line) and _LIST_MARKER.fullmatch(line[start:position].strip()):
                    continue
                yield line[start:position]
                start = position
            if not is_last and not lengths:  # the sentence continues beyond the window
                position += len(window)


def _segment_lengths(text: str, language: str) -> list[int]:
    """Return the number of characters of each sentence, with the whitespace around it.

    Version 1.0.32 of `sentencex` fails for some texts with whitespace of several bytes, so all
    whitespace is replaced by spaces. If it still fails, the text is one sentence.
    """
    try:
        lengths = [len(segment) for segment in sentencex.segment(language, _WHITESPACE.sub(" ", text)) if segment]
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library cannot be asked for this class
            raise
        return [len(text)]
    return lengths if sum(lengths) == len(text) else [len(text)]
