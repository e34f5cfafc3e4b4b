"""Translation of marked texts: sentences go to the engine, all else stays in its place."""

import asyncio
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from sightline.base.text.sentences import LANGUAGES_WITHOUT_SPACES
from sightline.base.text.words import Span
from sightline.translation.alignment import Characters, Engine, Findings, Translated
from sightline.translation.marks import Mark, MarkedText, PlacedMark, TranslatedText, nested
from sightline.translation.placing import place_marks
from sightline.translation.protected import Kept, kept_within, protected_spans
from sightline.translation.segments import divide, has_words, segments
from sightline.translation.stand_ins import Aligned, Sentence

_NUMBER, _WHOLE_NUMBER = re.compile(r"\d+"), re.compile(r"(?<!\w)\d+(?!\w)")
_LEAST_DIVIDED = 32  # characters of a sentence that is divided if its translation is incomplete


async def translate_texts(
    texts: Sequence[MarkedText], engine: Engine, *, writes_terms: bool = True
) -> list[list[TranslatedText]]:
    """Return the translations of each text with its marks: as many as its sentences have.

    If another model translates after this one, `writes_terms` is false: terms stay marked.
    """
    parts = await asyncio.to_thread(lambda: [_Text(text, engine, writes_terms) for text in texts])
    waiting = [(part, sentence) for part in parts for sentence in part.sentences]
    while waiting:
        results = await engine.translate(
            [sentence.form.model_text for _, sentence in waiting], [sentence.is_aligned for _, sentence in waiting]
        )
        incomplete = []
        for (part, sentence), result in zip(waiting, results, strict=True):
            sentence.translated = result
            is_complete = all(translated.is_complete for translated in result)
            pieces = part.copying_numbers(sentence) if is_complete else part.divide(sentence)
            incomplete += [(part, piece) for piece in pieces]
        waiting = incomplete
    return await asyncio.to_thread(lambda: [[part.joined(rank) for rank in range(part.num_ranks)] for part in parts])


class _Segment:
    """A sentence of a text, or a part of one that was divided."""

    def __init__(self, text: "_Text", start: int, end: int, marks: dict[int, Mark]) -> None:
        self.start, self.end = start, end
        self.translated: Sequence[Translated] = ()
        self.marks_of_text = marks  # as they are there
        source = text.source.text[start:end]
        kept = [
            Kept(span.start - start, span.end - start, span.is_symbol) for span in kept_within(text.kept, start, end)
        ]
        # In the sentence, from which those of several sentences extend.
        own = {index: replace(mark, start=mark.start - start, end=mark.end - start) for index, mark in marks.items()}
        self.marks = {index: mark for index, mark in own.items() if mark.kind != "term"}
        terms = {
            index: mark
            for index, mark in own.items()
            if mark.kind == "term" and 0 <= mark.start < mark.end <= end - start
            if not kept_within(kept, mark.start, mark.end)
        }
        # Terms that another model writes have places of their own, also those that marks have.
        self.followed = [self.marks, *([] if text.writes_terms else ({index: term} for index, term in terms.items()))]
        edges = {edge for mark in self.marks.values() for edge in (mark.start, mark.end)}
        self.form = Sentence(
            source, kept, [*terms.values()] if text.writes_terms else (), text.engine.unknown(source), edges
        )
        self.is_aligned = bool(self.form.kept) or any(
            mark.start > 0 or mark.end < end - start for marks in self.followed for mark in marks.values()
        )

    def aligned(self, rank: int) -> Aligned:
        """Return a translation with what is kept."""
        groups = [(mark.start, mark.end) for mark in self.marks.values() if mark.start < mark.end]
        return self.form.aligned(self.translated[rank], groups)


class _Text:
    """A text with its sentences."""

    def __init__(self, source: MarkedText, engine: Engine, writes_terms: bool) -> None:
        self.source, self.engine, self.writes_terms = source, engine, writes_terms
        given = [Kept(mark.start, mark.end) for mark in source.marks if mark.kind == "keep"]
        self.kept = protected_spans(source.text, given)
        spans = segments(source.text, self.kept, engine.source_language, engine.fits)
        self.sentences = self.segments(spans, dict(enumerate(source.marks)))

    def segments(self, spans: Sequence[Span], marks: dict[int, Mark]) -> list[_Segment]:
        """Return sentences with their marks, the outer ones first.

        Points at the edges of a sentence belong to it if the mark around them does; others are
        beside it.
        """
        found: list[dict[int, Mark]] = [{} for _ in spans]
        for index, mark in marks.items():
            first = bisect_left(spans, mark.start, key=lambda span: span[1])
            for number in range(first, bisect_right(spans, mark.end, key=lambda span: span[0])):
                start, end = spans[number]
                is_point_inside = start <= mark.start == mark.end <= end and mark.parent in found[number]
                if (mark.start < end and mark.end > start) or is_point_inside:
                    found[number][index] = mark
                    if mark.start == mark.end:  # it is not in the next sentence, too
                        break
        return [_Segment(self, *span, own) for span, own in zip(spans, found, strict=True)]

    def divide(self, sentence: _Segment) -> list[_Segment]:
        """Divide a sentence whose translation is incomplete; return its parts, if there are any."""
        text, kept, start, end = self.source.text, self.kept, sentence.start, sentence.end
        if end - start < _LEAST_DIVIDED:
            return []
        spans = [span for span in divide(text, start, end, kept) if has_words(text, *span, kept)]
        if not spans or spans == [(start, end)]:
            return []
        return self._replace(sentence, spans)

    def copying_numbers(self, sentence: _Segment) -> list[_Segment]:
        """Return a sentence that copies the numbers in place of which the model wrote others; else
        nothing. Three in the afternoon may become 15.
        """
        read, written = ({*_NUMBER.findall(text)} for text in (sentence.form.model_text, sentence.translated[0].text))
        if not written.difference(read, (str(int(number) + 12) for number in read if len(number) < 3)):
            return []
        found = _WHOLE_NUMBER.finditer(self.source.text, sentence.start, sentence.end)
        lost = [Kept(*number.span()) for number in found if number[0] not in written]
        numbers = [span for span in lost if not kept_within(self.kept, span.start, span.end)]
        self.kept = sorted([*self.kept, *numbers])
        return self._replace(sentence, [(sentence.start, sentence.end)]) if numbers else []

    def _replace(self, sentence: _Segment, spans: Sequence[Span]) -> list[_Segment]:
        parts = self.segments(spans, sentence.marks_of_text)
        place = self.sentences.index(sentence)
        self.sentences[place : place + 1] = parts
        return parts

    @property
    def num_ranks(self) -> int:
        """Number of translations: a beam search finds fewer for some sentences."""
        return min((len(sentence.translated) for sentence in self.sentences), default=1)

    def joined(self, rank: int) -> TranslatedText:
        """Join the translations of the sentences with what is between them."""
        text, position, source = "", 0, self.source.text
        is_spaced = self.engine.target_language.partition("-")[0] not in LANGUAGES_WITHOUT_SPACES
        bounds: list[tuple[int, int]] = [(0, 0)]  # source and target positions of the edges of sentences
        placed: dict[int, list[PlacedMark]] = {}
        ranges: list[tuple[int, int, int, int]] = []
        findings: list[Findings] = []
        for sentence in self.sentences:
            text += source[position : sentence.start]
            if is_spaced and sentence.start == position > 0 and text[-1:].strip():
                text += " "
            aligned = sentence.aligned(rank)
            bounds += [(sentence.start, len(text)), (sentence.end, len(text) + len(aligned.text))]
            ranges.append((sentence.start, sentence.end, len(text), len(text) + len(aligned.text)))
            if own := sentence.translated[rank].findings:
                source_characters = Characters(sentence.form.text, sentence.start, sentence.form.origins)
                findings.append(own.placed(source_characters, Characters(aligned.text, len(text), aligned.places)))
            for followed in sentence.followed:
                for mark in place_marks(aligned, sentence.end - sentence.start, followed):
                    moved = replace(mark, start=mark.start + len(text), end=mark.end + len(text))
                    placed.setdefault(mark.index, []).append(moved)
            text, position = text + aligned.text, sentence.end
        text += source[position:]
        kinds = [mark.kind for mark in self.source.marks]
        marks = [
            mark
            for index, kind in enumerate(kinds)
            if kind != "term"
            for mark in self._whole(index, placed.get(index, []), bounds)
        ]
        terms = [part for index, parts in placed.items() if kinds[index] == "term" for part in parts]
        return TranslatedText(text, [*nested(self.source.marks, marks, len(text)), *terms], ranges, findings)

    def _whole(self, index: int, parts: Sequence[PlacedMark], bounds: Sequence[Span]) -> Sequence[PlacedMark]:
        """Return the places of a mark: as its sentences have it, or as it is between them."""
        mark = self.source.marks[index]

        def near(position: int) -> int:
            """Return the index of the last edge before a character; odd in sentences."""
            return bisect_right(bounds, position, key=lambda bound: bound[0]) - 1

        def moved(position: int) -> int:
            source, target = bounds[near(position)]
            return target + position - source

        if mark.start == mark.end:
            return parts or [PlacedMark(index, moved(mark.start), moved(mark.start))]
        first, last = near(mark.start), near(mark.end - 1)
        if parts and first == last and first % 2:
            return parts
        start = parts[0].start if parts and first % 2 else moved(mark.start)
        end = parts[-1].end if parts and last % 2 else moved(mark.end)
        return [PlacedMark(index, start, max(start, end), min([part.confidence for part in parts], default=1.0))]
