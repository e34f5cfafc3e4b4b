"""Translation of marked texts: sentences go to the engine, all else stays in its place."""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from sightline.base.text.sentences import LANGUAGES_WITHOUT_SPACES
from sightline.base.text.words import Span
from sightline.translation.alignment import Engine, Translated
from sightline.translation.marks import Mark, MarkedText, PlacedMark, TranslatedText
from sightline.translation.placing import place_marks
from sightline.translation.protected import Kept, protected_spans
from sightline.translation.segments import divide, has_words, kept_within, segments
from sightline.translation.stand_ins import Aligned, Sentence

T = TypeVar("T")
_INLINE_CHARACTERS = 16_384  # longer texts are prepared in a thread
_LEAST_DIVIDED = 32  # characters of a sentence that is divided if its translation is incomplete


async def translate_texts(texts: Sequence[MarkedText], engine: Engine) -> list[list[TranslatedText]]:
    """Return the translations of each text with its marks: as many as its sentences have."""
    size = sum(len(text.text) for text in texts)
    parts = await _run(size, lambda: [_Text(text, engine) for text in texts])
    waiting = [sentence for part in parts for sentence in part.sentences]
    while waiting:
        results = await engine.translate(
            [sentence.form.model_text for sentence in waiting], [sentence.is_aligned for sentence in waiting]
        )
        incomplete = []
        for sentence, result in zip(waiting, results, strict=True):
            sentence.translated = result
            if not all(translated.is_complete for translated in result) and sentence.divide():
                incomplete += sentence.parts
        waiting = incomplete
    return await _run(size, lambda: [[part.joined(rank) for rank in range(part.num_ranks)] for part in parts])


async def _run(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _INLINE_CHARACTERS else await asyncio.to_thread(work)


class _Segment:
    """A sentence of a text, or the parts into which it was divided."""

    def __init__(self, text: "_Text", start: int, end: int) -> None:
        self.start, self.end = start, end
        self.parts: list[_Segment] = []
        self.translated: Sequence[Translated] = ()
        self._text = text
        source = text.source.text[start:end]
        kept = [
            Kept(span.start - start, span.end - start, span.is_symbol) for span in kept_within(text.kept, start, end)
        ]
        self.marks = {
            index: replace(mark, start=mark.start - start, end=mark.end - start)
            for index, mark in text.marks_of(start, end)
        }
        edges = {edge for mark in self.marks.values() for edge in (mark.start, mark.end)}
        self.form = Sentence(source, kept, text.engine.unknown(source), edges)
        self.is_aligned = bool(self.form.kept) or any(
            mark.start > 0 or mark.end < end - start for mark in self.marks.values()
        )

    def divide(self) -> bool:
        """Divide a sentence whose translation is incomplete; return False if it is too short."""
        if self.end - self.start < _LEAST_DIVIDED:
            return False
        text, kept = self._text.source.text, self._text.kept
        spans = [span for span in divide(text, self.start, self.end, kept) if has_words(text, *span, kept)]
        self.parts = [_Segment(self._text, *span) for span in spans if span != (self.start, self.end)]
        return bool(self.parts)

    def aligned(self, rank: int) -> Aligned:
        """Return a translation with what is kept."""
        groups = [(mark.start, mark.end) for mark in self.marks.values() if mark.start < mark.end]
        return self.form.aligned(self.translated[rank], groups)

    def leaves(self) -> Iterator["_Segment"]:
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


class _Text:
    """A text with its sentences."""

    def __init__(self, source: MarkedText, engine: Engine) -> None:
        self.source, self.engine = source, engine
        self._starts = [mark.start for mark in source.marks]
        given = [Kept(mark.start, mark.end) for mark in source.marks if mark.kind == "keep"]
        self.kept = protected_spans(source.text, given)
        spans = segments(source.text, self.kept, engine.source_language, engine.fits)
        self.sentences = [_Segment(self, *span) for span in spans]

    def marks_of(self, start: int, end: int) -> Iterator[tuple[int, Mark]]:
        """Yield the marks that are in a sentence, the outer ones first.

        Points at its edges belong to it if the mark around them does; others are beside it.
        """
        marks = self.source.marks
        outer: list[int] = []
        first = bisect_left(self._starts, start)
        parent = first - 1 if first else None
        while parent is not None:
            outer.append(parent)
            parent = marks[parent].parent
        found: set[int] = set()
        for index in [*reversed(outer), *range(first, bisect_right(self._starts, end))]:
            mark = marks[index]
            is_inside = mark.start < end and mark.end > start
            if mark.start == mark.end:
                is_inside = is_inside or (start <= mark.start <= end and mark.parent in found)
            if is_inside:
                found.add(index)
                yield index, mark

    @property
    def num_ranks(self) -> int:
        """Number of translations: a beam search finds fewer for some sentences."""
        return min((len(leaf.translated) for leaf in self._leaves()), default=1)

    def _leaves(self) -> Iterator["_Segment"]:
        for sentence in self.sentences:
            yield from sentence.leaves()

    def joined(self, rank: int) -> TranslatedText:
        """Join the translations of the sentences with what is between them."""
        text, position, source = "", 0, self.source.text
        is_spaced = self.engine.target_language.partition("-")[0] not in LANGUAGES_WITHOUT_SPACES
        bounds: list[tuple[int, int]] = [(0, 0)]  # source and target positions of the edges of sentences
        placed: dict[int, list[PlacedMark]] = {}
        leaves = list(self._leaves())
        for leaf in leaves:
            text += source[position : leaf.start]
            if is_spaced and leaf.start == position > 0 and text[-1:].strip():
                text += " "
            aligned = leaf.aligned(rank)
            bounds += [(leaf.start, len(text)), (leaf.end, len(text) + len(aligned.text))]
            for mark in place_marks(aligned, leaf.end - leaf.start, leaf.marks):
                moved = replace(mark, start=mark.start + len(text), end=mark.end + len(text))
                placed.setdefault(mark.index, []).append(moved)
            text, position = text + aligned.text, leaf.end
        text += source[position:]
        marks = [self._whole(index, placed.get(index, []), bounds, leaves) for index in range(len(self.source.marks))]
        return TranslatedText(text, _nested(self.source.marks, marks, len(text)))

    def _whole(
        self, index: int, parts: Sequence[PlacedMark], bounds: Sequence[Span], leaves: Sequence["_Segment"]
    ) -> list[PlacedMark]:
        """Return the places of a mark: as its sentences have them, or as it is between them."""
        mark = self.source.marks[index]

        def moved(position: int) -> int:
            source, target = bounds[bisect_right(bounds, position, key=lambda bound: bound[0]) - 1]
            return target + position - source

        def sentence_at(position: int) -> bool:
            """Return True if a character is in a sentence."""
            near = bisect_right(leaves, position, key=lambda leaf: leaf.start) - 1
            return near >= 0 and position < leaves[near].end

        if mark.start == mark.end:
            return [parts[0] if parts else PlacedMark(index, moved(mark.start), moved(mark.start))]
        starts_inside, ends_inside = sentence_at(mark.start), sentence_at(mark.end - 1)
        if starts_inside and ends_inside and len({(part.start, part.end) for part in parts}) > 1 and mark.may_split:
            return list(parts)
        start = parts[0].start if starts_inside and parts else moved(mark.start)
        end = parts[-1].end if ends_inside and parts else moved(mark.end)
        return [PlacedMark(index, start, max(start, end), min([part.confidence for part in parts], default=1.0))]


def _nested(marks: Sequence[Mark], placed: Sequence[Sequence[PlacedMark]], size: int) -> list[PlacedMark]:
    """Return placed marks in order, each inside of its parent and none over a part of another."""
    children: dict[int | None, list[PlacedMark]] = {}
    for index, mark in enumerate(marks):
        children.setdefault(mark.parent, []).extend(placed[index])
    result: list[PlacedMark] = []
    waiting: list[tuple[PlacedMark | None, int, int]] = [(None, 0, size)]
    while waiting:
        parent, start, end = waiting.pop()
        if parent is not None:
            result.append(parent)
        inner: list[tuple[PlacedMark | None, int, int]] = []
        own = children.pop(parent.index, []) if parent is not None else children.pop(None, [])
        for child in sorted(own, key=lambda mark: (mark.start, mark.end, mark.index)):
            first = min(max(child.start, start), end)
            last = min(max(child.end, first), end)
            inner.append((replace(child, start=first, end=last), first, last))
            start = last
        waiting += reversed(inner)
    return result
