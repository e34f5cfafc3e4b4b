"""Subtitles (SubRip and WebVTT): sentences that cues share are translated as a whole, and divided
where alignment shows it.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from sightline.base.text.sentences import has_letter
from sightline.translation.files.document import DocumentError, decode, ends_of_tags
from sightline.translation.marks import MarkedText, TextBuilder, Texts, TranslatedText

_TIMES = re.compile(r"^[ \t]*((?:\d+:)?\d+:\d+[.,]\d+)[ \t]*-->[ \t]*((?:\d+:)?\d+:\d+[.,]\d+)")
_TAG = re.compile(r"</?(?:[bius]|font|c|v|lang|ruby|rt)(?=[\s.>])[^<>\n]*>|<[\d:.]+>|\{\\[^{}\n]*\}", re.IGNORECASE)
_END = re.compile(r"[.!?…。！？♪)\]\"”»:][\"'”’»)\]*♪\s]*$")
_SPEAKER = re.compile(r"^\s*(?:[-–—‐♪#>]|<v[\s.]|[^\W\d_][\w .]{0,20}:(?=\s))")  # the start of a line of its own
_MAX_GAP_S = 2.0  # between cues of one sentence
_MAX_CUES = 8
_WIDTH = 42  # characters of a line, at least
_DISTANCE = 0.2  # cost of a character between a cut and its place by length


@dataclass
class _Cue:
    start: float
    end: float
    lines: list[str] = field(default_factory=list)
    first_line: int = 0

    @property
    def text(self) -> str:
        """Lines, of which those that continue a sentence are joined."""
        joined = self.lines[0]
        for line in self.lines[1:]:
            joined += ("\n" if _SPEAKER.match(line) else " ") + line.strip()
        return joined


class Subtitles(Texts):
    """A file of subtitles, of which only the lines of the cues change."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        text, self._encoding = decode(data)
        self._newline = "\r\n" if "\r\n" in text else "\n"
        lines = re.split(r"\r\n|\r|\n", text)
        self._lines: list[str | None] = [*lines]
        cues = list(_cues(lines))
        if not cues and text.strip().removeprefix("WEBVTT").strip():
            raise DocumentError("has no cue with times such as 00:00:01,000 --> 00:00:02,000")
        for group in _groups([cue for cue in cues if has_letter(_TAG.sub("", cue.text))]):
            builder = _builder(group)
            source = builder.finish()
            self.add(source, partial(self._write, group, builder, source))

    def _write(self, group: Sequence[_Cue], builder: TextBuilder, source: MarkedText, result: TranslatedText) -> None:
        for cue, text in zip(group, _divided(group, builder, source, result), strict=True):
            first, last = cue.first_line, cue.first_line + len(cue.lines)
            self._lines[first:last] = [text.replace("\n", self._newline), *[None] * (len(cue.lines) - 1)]

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        return self._newline.join([line for line in self._lines if line is not None]).encode(self._encoding)


def _cues(lines: Sequence[str]) -> Iterator[_Cue]:
    """Yield the cues; each has the lines after its times until a blank line."""
    cue: _Cue | None = None
    for number, line in enumerate([*lines, ""]):
        match = _TIMES.match(line)
        if match:
            cue = _Cue(_seconds(match[1]), _seconds(match[2]), first_line=number + 1)
        elif cue is not None and line.strip():
            cue.lines.append(line)
        elif cue is not None:
            if cue.lines:
                yield cue
            cue = None


def _seconds(time: str) -> float:
    seconds = 0.0
    for part in time.replace(",", ".").split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def _groups(cues: Sequence[_Cue]) -> Iterator[list[_Cue]]:
    """Yield cues in groups that share sentences."""
    group: list[_Cue] = []
    for before, cue in pairwise([None, *cues]):
        assert cue is not None
        if before is not None and not (
            len(group) < _MAX_CUES
            and cue.start >= before.start
            and cue.start - before.end <= _MAX_GAP_S
            and not _END.search(_TAG.sub("", before.text))
            and not _SPEAKER.match(_TAG.sub("", cue.text))
        ):
            yield group
            group = []
        group.append(cue)
    if group:
        yield group


def _builder(group: Sequence[_Cue]) -> TextBuilder:
    """Build the text of a group: a mark for each cue, and in it those of its tags."""
    builder = TextBuilder()
    for number, cue in enumerate(group):
        if number:
            builder.add(" ")
        builder.open(("", ""))
        text, position = cue.text, 0
        tags = {match.start(): match[0] for match in _TAG.finditer(text)}
        ends = ends_of_tags((start, _name(tag), tag.startswith("</")) for start, tag in tags.items())
        for start, tag in tags.items():
            builder.add(text[position:start])
            if start in ends:
                builder.open((tag, tags[ends[start]]))
            elif start in ends.values():
                builder.close()
            else:
                builder.point((tag, ""))
            position = start + len(tag)
        builder.add(text[position:])
        builder.close()
    return builder


def _name(tag: str) -> str:
    return re.split(r"[\s.>}]", tag.strip("</"))[0]


def _divided(group: Sequence[_Cue], builder: TextBuilder, source: MarkedText, result: TranslatedText) -> Iterator[str]:
    """Yield the text of each cue of a group."""
    cuts = [0, *_cuts(source, result), len(result.text)]
    cues: list[int] = []  # the mark of the cue of each mark
    for index, mark in enumerate(source.marks):
        cues.append(index if mark.parent is None else cues[mark.parent])
    for cue, number, (start, end) in zip(group, sorted(set(cues)), pairwise(cuts), strict=True):
        inside = []
        for placed in result.marks:
            own, whole = source.marks[placed.index], source.marks[cues[placed.index]]
            first, last = max(placed.start, start), min(placed.end, end)
            if own.start == whole.start and own.end in (
                whole.start,
                whole.end,
            ):  # it stays around its cue, or before it
                if cues[placed.index] == number:
                    inside.append((start, start if own.start == own.end else end, builder.things[placed.index]))
            elif first < last or (placed.start == placed.end and start <= placed.start < max(end, 1)):
                inside.append((first, last, builder.things[placed.index]))
        text, position = "", start
        waiting: list[tuple[int, str]] = []
        for first, last, (before, after) in sorted(inside, key=lambda tag: (tag[0], -tag[1])):
            while waiting and waiting[-1][0] <= first < last:
                place, tag = waiting.pop()
                text, position = text + result.text[position:place] + tag, place
            text, position = text + result.text[position:first] + before, first
            waiting.append((last, after))
        for place, tag in reversed(waiting):
            text, position = text + result.text[position:place] + tag, place
        yield _wrapped(cue, (text + result.text[position:end]).strip())


def _cuts(source: MarkedText, result: TranslatedText) -> Iterator[int]:
    """Yield the places in a translation between two cues: between words, so that few of the words
    that alignment gives to a cue are outside of it, and in the order of the cues.
    """
    cues = [mark for mark in source.marks if mark.parent is None]
    placed = {mark.index: mark for mark in result.marks}
    tops = [placed[index] for index, mark in enumerate(source.marks) if mark.parent is None]
    spaces = [match.end() for match in re.finditer(r"\s+", result.text)]
    if len(spaces) < len(cues) - 1:  # a language without spaces, or fewer words than cues
        spaces = list(range(1, len(result.text)))
    first = 0
    for number in range(len(cues) - 1):
        expected = len(result.text) * cues[number + 1].start / max(len(source.text), 1)
        left = len(cues) - 2 - number  # cuts after this one

        def cost(place: int, number: int = number, expected: float = expected) -> float:
            late = sum(max(0, mark.end - max(mark.start, place)) for mark in tops[: number + 1])
            early = sum(max(0, min(mark.end, place) - mark.start) for mark in tops[number + 1 :])
            return late + early + _DISTANCE * abs(place - expected)

        able = range(first, max(len(spaces) - left, first))
        chosen = min(able, key=lambda index: cost(spaces[index]), default=None)
        if chosen is None:
            yield len(result.text)
        else:
            yield spaces[chosen]
            first = chosen + 1


def _wrapped(cue: _Cue, text: str) -> str:
    """Return a text in as many lines as its cue had, if they are short enough."""
    wrapped: list[str] = []
    count = len(cue.lines)
    for line in text.split("\n"):
        width = max(_WIDTH, *(len(_TAG.sub("", own)) for own in cue.lines))
        if count == 1 or len(line) <= width or _TAG.search(line):
            wrapped.append(line)
            continue
        number = max(2, -(-len(line) // width))
        wrapped += textwrap.wrap(line, -(-len(line) // number) + 8, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapped)
