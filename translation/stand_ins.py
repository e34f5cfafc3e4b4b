"""Sentences as a model reads them: a name stands in for each part that it must not change, and is
replaced in the translation, at the place to which alignment points.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sightline.base.text.words import Span, word_spans
from sightline.translation.alignment import Translated, Weights, best_range, share_of, shared
from sightline.translation.protected import Kept

# Names that all models know and copy.
_NAMES = ("Peter", "Anna", "Paul", "Maria", "David", "Laura", "Martin", "Sara", "Robert", "Julia", "Thomas", "Eva")
# What a model reads instead of a character that it does not know.
_PLAIN = {
    "’": "'", "‘": "'", "‚": ",", "‛": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‹": "'", "›": "'",
    "–": "-", "—": "-", "‑": "-", "‐": "-", "−": "-", "…": "...", "\u00a0": " ", "\u202f": " ", "\t": " ", "\n": " ",
    "\r": " ", "\u00ad": "", "\u200b": "", "\ufeff": "",
}  # fmt: skip
_LEAST_SHARE = 0.2  # of a word that stands for a stand-in which the model changed
_MAX_ENDING = 3  # letters that a model adds to a name, such as a genitive's


@dataclass(frozen=True)
class Edit:
    """A part of a sentence that the model reads in another form."""

    start: int
    end: int
    text: str
    is_kept: bool
    glued: tuple[bool, bool] = (False, False)  # a space was added before it; after it

    @property
    def name(self) -> str:
        return self.text.strip(" ")


@dataclass(frozen=True)
class AlignedWord:
    """A word of a sentence."""

    start: int
    end: int
    is_mark: bool = False  # a punctuation mark
    kept: Span | None = None  # the part of the source that the word is a copy of


@dataclass(frozen=True)
class Aligned:
    """A translated sentence with its words and the shares between them."""

    text: str
    source_words: Sequence[AlignedWord]
    target_words: Sequence[AlignedWord]
    shares: Weights  # (target words, source words)


class Sentence:
    """A sentence, and its form for the model."""

    def __init__(self, text: str, kept: Sequence[Kept], unknown: Sequence[Span], edges: Collection[int] = ()) -> None:
        """Make stand-ins for what is kept and for words with characters that the model lacks.

        At the `edges` of marks, what is kept before and after has stand-ins of its own.
        """
        self.text = text
        self.edits = list(_edits(text, kept, unknown, edges))
        parts, position, shift = [], 0, 0
        self._starts: list[tuple[int, int, Edit]] = []  # range of each edit in the model's text
        for edit in self.edits:
            parts += [text[position : edit.start], edit.text]
            self._starts.append((edit.start + shift, edit.start + shift + len(edit.text), edit))
            shift += len(edit.text) - (edit.end - edit.start)
            position = edit.end
        self.model_text = "".join([*parts, text[position:]])

    @property
    def kept(self) -> list[Edit]:
        return [edit for edit in self.edits if edit.is_kept]

    def aligned(self, translated: Translated, groups: Sequence[Span]) -> Aligned:
        """Return the translation with what is kept in the place of its stand-ins.

        `groups` are the marks of the sentence as ranges of the source: what is kept inside of each
        must stay together. The first and the last character stand for what precedes and follows.
        """
        if not self.kept:
            return self._without_kept(translated)
        shares, words = shared(translated.weights), translated.target_words
        targets = _Targets(translated, shares)
        columns = {
            edit: [index for index, word in enumerate(translated.source_words) if word[0] < end and word[1] > start]
            for start, end, edit in self._starts
            if edit.is_kept
        }
        places = {edit: targets.find(edit.name, columns[edit]) for edit in sorted(self.kept, key=targets.certainty)}
        for edit in self.kept:
            if places[edit] is None:
                places[edit] = targets.beside(columns[edit])
        slots = [place for place in places.values() if place is not None]
        if not _are_together(
            self.kept, [slots[list(places).index(edit)] for edit in self.kept], groups, len(self.text)
        ):
            places = dict(zip(self.kept, sorted(slots), strict=True))
        return self._restore(
            translated, shares, {edit: place for edit, place in places.items() if place}, columns, words
        )

    def _without_kept(self, translated: Translated) -> Aligned:
        return Aligned(
            translated.text,
            [self._source_word(translated, word) for word in translated.source_words],
            [_target_word(translated.text, start, end) for start, end in translated.target_words],
            shared(translated.weights),
        )

    def _source_word(self, translated: Translated, word: Span) -> AlignedWord:
        start, end = self._original(word[0], False), self._original(word[1], True)
        return AlignedWord(start, end, not any(map(str.isalnum, self.text[start:end])))

    def _original(self, position: int, is_end: bool) -> int:
        """Return the character of the sentence for one of the model's text."""
        shift = 0
        for start, end, edit in self._starts:
            if position < start + is_end:
                break
            if position < end + is_end and not (is_end and position <= start):
                same = edit.end - edit.start == end - start
                return edit.start + position - start if same else edit.end if is_end else edit.start
            shift = edit.end - end
        return position + shift

    def _restore(
        self,
        translated: Translated,
        shares: Weights,
        places: dict[Edit, Span],
        columns: dict[Edit, list[int]],
        words: Sequence[Span],
    ) -> Aligned:
        """Write what is kept over its places in the translation."""
        source = translated.text
        own = {column for edit_columns in columns.values() for column in edit_columns}
        names = {edit.name for edit in places}
        changes: list[tuple[Span, Edit | None]] = [(place, edit) for edit, place in places.items()]
        # A name that a model repeats is debris.
        for start, end in words:
            if source[start:end] in names and not any(start < place[1] and end > place[0] for place, _ in changes):
                changes.append(((start, end), None))
        changes.sort(key=lambda change: (change[0], -1 if change[1] is None else change[1].start))
        others = [index for index in range(len(translated.source_words)) if index not in own]
        source_words = [self._source_word(translated, translated.source_words[index]) for index in others]
        source_words += [AlignedWord(edit.start, edit.end, kept=(edit.start, edit.end)) for edit in places]
        target_words: list[AlignedWord] = []
        rows: list[Weights] = []
        text, position, strips = "", 0, False

        def copy(end: int) -> None:
            nonlocal text, position, strips
            piece = source[position:end]
            if strips:
                piece, strips = piece.removeprefix(" "), False
            shift = len(text) + len(piece) - end
            for index, (first, last) in enumerate(words):
                if max(first, position) < min(last, end):
                    word = _target_word(source, max(first, position), min(last, end))
                    target_words.append(AlignedWord(max(0, word.start + shift), word.end + shift, word.is_mark))
                    rows.append(np.concatenate([shares[index, others], np.zeros(len(places), np.float32)]))
            text, position = text + piece, end

        for (start, end), edit in changes:
            copy(max(start, position))
            if edit is None:
                text, strips = text.removesuffix(" "), not text.endswith(" ")
                position = max(end, position)
                continue
            content = self.text[edit.start : edit.end]
            if edit.glued[0]:
                text = text.removesuffix(" ")
            elif start == end and text and not text[-1].isspace():
                text += " "
            target_words.append(AlignedWord(len(text), len(text) + len(content), kept=(edit.start, edit.end)))
            row = np.zeros(len(others) + len(places), np.float32)
            row[len(others) + list(places).index(edit)] = 1
            rows.append(row)
            text, position, strips = text + content, max(end, position), edit.glued[1]
            follows = source[position : position + 1]
            if start == end and not strips and follows.isalnum():
                text += " "
            elif start < end and follows.isalnum() and source[start:end] == edit.name:
                text += "-"  # the model made a compound of the name
        copy(len(source))
        order = sorted(range(len(source_words)), key=lambda index: source_words[index].start)
        return Aligned(text, [source_words[index] for index in order], target_words, np.array(rows)[:, order])


def _target_word(text: str, start: int, end: int) -> AlignedWord:
    return AlignedWord(start, end, not any(map(str.isalnum, text[start:end])))


class _Targets:
    """The words of a translation, of which each can be taken by one stand-in."""

    def __init__(self, translated: Translated, shares: Weights) -> None:
        self._text, self._words, self._shares = translated.text, translated.target_words, shares
        self._are_free = [True] * len(self._words)

    def certainty(self, edit: Edit) -> int:
        """Return a number to sort by: stand-ins that occur once come first."""
        return abs(len(self._literal(edit.name)) - 1)

    def _literal(self, name: str) -> list[int]:
        return [index for index, (start, _) in enumerate(self._words) if self._text.startswith(name, start)]

    def find(self, name: str, columns: Sequence[int]) -> Span | None:
        """Return the characters that stand for a stand-in, and take their words."""
        share = share_of(self._shares, columns) if self._shares.size else np.zeros(len(self._words))
        literal = [index for index in self._literal(name) if self._are_free[index]]
        if literal:
            index = max(literal, key=lambda index: share[index])
            self._are_free[index] = False
            start, end = self._words[index]
            ending = re.match(r"[^\W\d_]*", self._text[start + len(name) : end])
            assert ending is not None, "it may be empty"
            return start, start + len(name) + (ending.end() if ending.end() <= _MAX_ENDING else 0)
        values = [
            value - 0.5 if is_free and any(map(str.isalnum, self._text[slice(*word)])) else -np.inf
            for value, is_free, word in zip(share, self._are_free, self._words, strict=True)
        ]
        best = best_range(values, 0, len(values))
        if best is None and values and max(values) >= _LEAST_SHARE - 0.5:
            best = int(np.argmax(values)), int(np.argmax(values)) + 1
        if best is None:
            return None
        self._are_free[slice(*best)] = [False] * (best[1] - best[0])
        return self._words[best[0]][0], self._words[best[1] - 1][1]

    def beside(self, columns: Sequence[int]) -> Span:
        """Return the place after the translation of the word before a stand-in.

        Without one, it is before the mark at the end of the translation.
        """
        if columns and columns[0] > 0 and self._shares.size and self._shares[:, columns[0] - 1].any():
            end = self._words[int(self._shares[:, columns[0] - 1].argmax())][1]
            return end, end
        if columns and columns[0] == 0:
            return 0, 0
        end = len(self._text)
        while end and not self._text[end - 1].isalnum():
            end -= 1
        return end, end


def _are_together(edits: Sequence[Edit], places: Sequence[Span], groups: Sequence[Span], size: int) -> bool:
    """Return True if what is kept inside of each mark has nothing else that is kept within."""
    order = sorted(range(len(edits)), key=lambda index: (places[index], edits[index].start))
    for start, end in groups:
        inside = [start <= edits[index].start and edits[index].end <= end for index in order]
        inside = [start < 0, *inside, end > size]
        if True in inside and sum(inside) != len(inside) - inside.index(True) - inside[::-1].index(True):
            return False
    return True


def _edits(text: str, kept: Sequence[Kept], unknown: Sequence[Span], edges: Collection[int]) -> Iterator[Edit]:
    """Yield the parts of a sentence that the model reads in another form, in order."""
    words = word_spans(text) if unknown else []
    spans, plain = [(span.start, span.end) for span in kept], list[Span]()
    for start, end in unknown:
        if any(span.start < end and start < span.end for span in kept):
            continue
        if text[start:end] in _PLAIN:
            plain.append((start, end))
        else:
            own = [word for word in words if word[0] < end and start < word[1]]
            spans.append((min([start, *[word[0] for word in own]]), max([end, *[word[1] for word in own]])))
    names = [name for name in _NAMES if name not in text] or list(_NAMES)
    merged: list[Span] = []
    for start, end in sorted(spans):
        is_joint = bool(merged) and _is_joint(text[merged[-1][1] : start])
        if merged and (
            start < merged[-1][1] or (is_joint and not any(merged[-1][1] <= edge <= start for edge in edges))
        ):
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    edits = []
    for number, (start, end) in enumerate(merged):
        touches = number > 0 and merged[number - 1][1] == start
        glued = touches or text[start - 1 : start].isalnum(), text[end : end + 1].isalnum()
        name = " " * glued[0] + names[number % len(names)] + " " * glued[1]
        edits.append(Edit(start, end, name, True, glued))
    edits += [
        Edit(start, end, _PLAIN[text[start:end]], False)
        for start, end in plain
        if not any(span[0] < end and start < span[1] for span in merged)
    ]
    yield from sorted(edits, key=lambda edit: edit.start)


def _is_joint(between: str) -> bool:
    return len(between) <= 3 and not any(map(str.isalnum, between))
