"""Subtitles (SubRip and WebVTT): sentences that cues share are translated as a whole, and divided
where alignment shows it.
"""

import re
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise

from sightline.base.text.sentences import has_letter
from sightline.translation.files.document import DocumentError, decode
from sightline.translation.files.strings import Replacements, add_pieces, tag_name
from sightline.translation.marks import MarkedText, Node, PlacedMark, TextBuilder, TranslatedText, nested, nodes_of

_TIMES = r"[ \t]*((?:\d+:)?\d+:\d+[.,]\d+)[ \t]*-->[ \t]*((?:\d+:)?\d+:\d+[.,]\d+)"
_NEWLINE = r"(?:\r\n?|\n|\Z)"
# The lines after its times, until a blank line or the next cue, which may have a number.
_CUE = re.compile(
    rf"(?<![^\r\n]){_TIMES}[^\r\n]*{_NEWLINE}((?:(?!(?:\d+[ \t]*{_NEWLINE})?{_TIMES})[ \t]*[^\s][^\r\n]*{_NEWLINE})+)"
)
_TAG = re.compile(r"(?i)(</?(?:[bius]|font|c|v|lang|ruby|rt)(?=[\s.>])[^<>\n]*>|<[\d:.]+>|\{\\[^{}\n]*\})")
_END = re.compile(r"[.!?…。！？♪)\]\"”»:][\"'”’»)\]*♪\s]*$")
# The start of a line of its own.
_SPEAKER = re.compile(r"^\s*(?:<(?!v\b)[^<>]*>)*(?:[-–—‐♪#>]|<v[\s.]|[^\W\d_][\w .]{0,20}:(?=\s))")
_MAX_GAP_S = 2.0  # between cues of one sentence
_MAX_CUES = 8
_WIDTH = 42  # characters of a line, at least
_DISTANCE = 0.2  # cost of a character between a cut and its place by length


@dataclass
class _Cue:
    start: float
    end: float
    lines: list[str]
    write: Callable[[str], None]

    @property
    def text(self) -> str:
        """Lines, of which those that continue a sentence are joined."""
        joined = self.lines[0]
        for line in self.lines[1:]:
            joined += ("\n" if _SPEAKER.match(line) else " ") + line.strip()
        return joined


class Subtitles(Replacements):
    """A file of subtitles, of which only the lines of the cues change."""

    def __init__(self, data: bytes) -> None:
        super().__init__(*decode(data))
        cues = list(self._cues())
        if not cues and self._text.strip().removeprefix("WEBVTT").strip():
            raise DocumentError("has no cue with times such as 00:00:01,000 --> 00:00:02,000")
        for group in _groups([cue for cue in cues if has_letter(_TAG.sub("", cue.text))]):
            builder = _builder(group)
            source = builder.finish()
            self.add(source, partial(_write, group, builder, source))

    def _cues(self) -> Iterator[_Cue]:
        newline = "\r\n" if "\r\n" in self._text else "\n"
        for match in _CUE.finditer(self._text):
            start = match.start(3)
            lines = self._text[start : match.end()].rstrip("\r\n")
            write = self.replace(start, start + len(lines), lambda text: text.replace("\n", newline))
            yield _Cue(_seconds(match[1]), _seconds(match[2]), lines.splitlines(), write)


def _write(group: Sequence[_Cue], builder: TextBuilder, source: MarkedText, result: TranslatedText) -> None:
    for cue, text in zip(group, _divided(group, builder, source, result), strict=True):
        cue.write(text)


def _seconds(time: str) -> float:
    return reduce(lambda seconds, part: 60 * seconds + float(part), time.replace(",", ".").split(":"), 0.0)


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
        parts = enumerate(_TAG.split(cue.text))
        add_pieces(builder, [(_kind(part) if number % 2 else "text", part) for number, part in parts])
        builder.close()
    return builder


def _kind(tag: str) -> str:
    return "end" if tag.startswith("</") else "start" if tag_name(tag) else "point"


def _divided(group: Sequence[_Cue], builder: TextBuilder, source: MarkedText, result: TranslatedText) -> Iterator[str]:
    """Yield the text of each cue of a group: its part of the translation, with the tags whose words
    are there. A tag at the edges of its cue stays there.
    """
    cuts = [0, *_cuts(source, result), len(result.text)]
    numbers = [index for index, mark in enumerate(source.marks) if mark.parent is None]
    ends = [start + len(result.text[start:end].rstrip()) for start, end in pairwise(cuts)]
    parts = dict(zip(numbers, zip(cuts, ends, strict=False), strict=True))
    marks, placed = [*source.marks], list[PlacedMark]()
    for each in result.marks:
        own = source.marks[each.index]
        cue = each.index if own.parent is None else own.parent
        if cue in parts:
            edges = {source.marks[cue].start: parts[cue][0], source.marks[cue].end: parts[cue][1]}
            if own.start in edges and own.end in edges:
                placed.append(replace(each, start=edges[own.start], end=edges[own.end]))
                continue
            middle = bisect_right(cuts, (each.start + each.end) / 2, hi=len(cuts) - 1)
            marks[each.index] = replace(own, parent=numbers[middle - 1])
        placed.append(each)
    divided = TranslatedText(result.text, nested(marks, placed, len(result.text)))
    nodes = [node for node in nodes_of(MarkedText(source.text, marks), divided) if not isinstance(node, str)]
    for own_cue, (_, content) in zip(group, nodes, strict=True):
        yield _wrapped(own_cue, _written(content, builder.things).strip())


def _written(nodes: Sequence[Node], things: Sequence[tuple[str, str]]) -> str:
    return "".join(node if isinstance(node, str) else _written(node[1], things).join(things[node[0]]) for node in nodes)


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
    width = max(_WIDTH, *(len(_TAG.sub("", own)) for own in cue.lines))
    for line in text.split("\n"):
        size = len(_TAG.sub("", line))
        if len(cue.lines) == 1 or size <= width:
            wrapped.append(line)
            continue
        whole = _TAG.sub(lambda tag: tag[0].replace(" ", "\0"), line)
        most = len(line) // max(2, -(-size // width)) + 8
        lines = textwrap.wrap(whole, most, break_long_words=False, break_on_hyphens=False)
        wrapped += [each.replace("\0", " ") for each in lines]
    return "\n".join(wrapped)
