"""Markdown (CommonMark with tables and strikethrough): the inline text of each block.

Lines of blocks stay as they are. The lines of a paragraph are joined, because its sentences are
translated as a whole.
"""

import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sightline.base.text.sentences import has_letter
from sightline.translation.files.document import decode, ends_of_tags
from sightline.translation.files.strings import Replacements
from sightline.translation.marks import Node, TextBuilder, TranslatedText, nodes_of

_FRONT_MATTER = re.compile(
    r"\A(?:---\r?\n.*?\r?\n(?:---|\.\.\.)|\+\+\+\r?\n.*?\r?\n\+\+\+)[ \t]*(?:\r?\n|\Z)", re.DOTALL
)
_NEWLINE = re.compile(r"\r\n|\r|\n")
_FOOTNOTE = re.compile(r"\[\^[^\]\s]+\]")
_LEAD = re.compile(r"\[\^[^\]\s]+\]:\s*|\[[ xX]\]\s|\[![A-Z]+\]\s*")  # of footnotes, tasks and alerts
_BLOCK = re.compile(r"\A(\s*\d*)([-+*>.)]|#{1,6})(?=\s)")  # a paragraph that would begin another block
_PREFIX = re.compile(r"[ \t>]*")
_LINE_START = re.compile(r"(?:[ \t>]|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])|#{1,6}(?=[ \t])|\|)*")
_Piece = tuple[int, int, str, str]  # start, end, kind, and what is written instead


class Markdown(Replacements):
    """A Markdown file."""

    def __init__(self, data: bytes) -> None:
        super().__init__(*decode(data))
        front = _FRONT_MATTER.match(self._text)
        offset = front.end() if front else 0
        text = self._text[offset:]
        self._newline = "\r\n" if "\r\n" in text else "\n"
        starts = [offset, *[offset + match.end() for match in _NEWLINE.finditer(text)]]
        lines = _NEWLINE.split(text)
        parser = _Parser()
        position = offset
        is_paragraph = False
        for block in parser.parse(text):
            if block.map is None:
                continue
            if block.type.endswith("_open"):
                is_paragraph = block.type == "paragraph_open"
            start, line = starts[block.map[0]], lines[block.map[0]]
            if block.type == "html_block":
                html = block.content.rstrip()
                if self._text.startswith(html, start):
                    self.add_markup(html, self.replace(start, start + len(html)))
            if block.type != "inline":
                continue
            inline = parser.inlines.pop(0)
            source = inline.source
            first, last = source.split("\n")[0].rstrip(), source.split("\n")[-1].rstrip()
            column = line.find(first, max(position - start, _LINE_START.match(line).end()))  # type: ignore[union-attr]
            escaped = set[str]()
            if column < 0:  # cells have no backslash before a vertical bar
                first, escaped = first.replace("|", "\\|"), {"|"}
                column = line.find(first, max(position - start, 0))
            if column < 0:
                continue
            start += column
            position = start + len(first)
            if "\n" in source:
                number = block.map[0] + source.count("\n")
                position = starts[number] + lines[number].rfind(last) + len(last)
                prefix = _PREFIX.match(lines[block.map[0] + 1])[0]  # type: ignore[index]
            else:
                prefix = re.sub(r"[^>\t]", " ", line[:column])
            pieces = sorted(_pieces(inline))
            self._add_inline(source, pieces, escaped, prefix, is_paragraph, self.replace(start, position))

    def _add_inline(
        self,
        source: str,
        pieces: list[_Piece],
        escaped: set[str],
        prefix: str,
        is_paragraph: bool,
        replace: Callable[[str], None],
    ) -> None:
        builder = TextBuilder()
        lead = _LEAD.match(source)
        escaped = escaped | _add_pieces(builder, source, pieces, lead.end() if lead else 0)
        text = builder.finish()

        def write(result: TranslatedText) -> None:
            line_break = f"\\{self._newline}{prefix}"
            first = lead[0].replace("\n", f"{self._newline}{prefix}") if lead else ""
            written = _written(nodes_of(text, result), builder.things, escaped, line_break)
            replace(first + (_BLOCK.sub(r"\1\\\2", written) if is_paragraph else written))

        if has_letter(text.text):
            self.add(text, write)


@dataclass
class _Inline:
    """An inline text, and how it was parsed."""

    source: str
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)  # rule, start, end, end of a label
    delimiters: dict[int, Any] = field(default_factory=dict)  # tokens by place


class _Parser:
    """Parses blocks, and records which part of an inline text each rule reads."""

    def __init__(self) -> None:
        from markdown_it import MarkdownIt, rules_inline

        self.inlines: list[_Inline] = []
        self._open: list[_Inline] = []  # the text of a picture is inside of another
        self._parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
        inline, self._parse = self._parser.inline, self._parser.inline.parse
        for name in ("escape", "entity", "newline", "link", "image", "autolink", "html_inline"):
            inline.ruler.at(name, self._recorded(name, getattr(rules_inline, name)))
        inline.ruler.at("backticks", self._recorded("backticks", rules_inline.backtick))
        inline.ruler.at("emphasis", self._recorded("emphasis", rules_inline.emphasis.tokenize))
        inline.ruler.at("strikethrough", self._recorded("strikethrough", rules_inline.strikethrough.tokenize))
        inline.parse = self._parse_inline  # type: ignore[assignment, method-assign]

    def parse(self, text: str) -> Any:
        return self._parser.parse(text)

    def _parse_inline(self, source: str, *rest: Any) -> Any:
        self._open.append(_Inline(source))
        try:
            return self._parse(source, *rest)
        finally:
            inline = self._open.pop()
            if not self._open:
                self.inlines.append(inline)

    def _recorded(self, name: str, rule: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
        def run(state: Any, silent: bool) -> bool:
            if silent:
                return rule(state, silent)
            start, count = state.pos, len(state.tokens) + bool(state.pending)  # pending text becomes a token first
            is_link = name == "link" and state.src[start] == "["
            label = state.md.helpers.parseLinkLabel(state, start, True) if is_link else -1
            is_read = rule(state, silent)
            if is_read and name in ("emphasis", "strikethrough"):
                place = start
                for token in state.tokens[count:]:
                    self._open[-1].delimiters[place] = token
                    place += len(token.content)
            elif is_read and (name != "backticks" or len(state.tokens) > count):
                self._open[-1].ranges.append((name, start, state.pos, label))
            return is_read

        return run


def _pieces(inline: _Inline) -> Iterator[_Piece]:
    """Yield the parts of a text that are no plain text."""
    source = inline.source
    for name, start, end, label in inline.ranges:
        own = source[start:end]
        if name == "link":
            after = source[label:end]
            if after in ("]", "][]"):  # the text is the name of a definition
                after = f"][{source[start + 1 : label]}]"
            yield start, start + 1, "start", "["
            yield label, end, "end", after
        elif name == "newline":
            yield start, end, "text", "\n" if source[:start].endswith("  ") else " "
        elif name == "escape":
            if own[1] in string.punctuation or own[1] == "\n":
                yield start, end, "text", own[1]
        elif name == "html_inline":
            kind = "end" if own.startswith("</") else "start" if _name(own) else "point"
            yield start, end, kind, own
        else:
            yield start, end, "point" if name == "image" else "keep", own
    for place, token in inline.delimiters.items():
        size = len(token.markup)
        if token.nesting == 1:
            start = place - (token.markup in ("**", "__"))  # the inner one of two has the token
            yield start, start + size, "start", token.markup
        elif token.nesting == -1:
            yield place, place + size, "end", token.markup


def _add_pieces(builder: TextBuilder, source: str, pieces: list[_Piece], position: int) -> set[str]:
    """Add a text from a position to a builder; return the characters that had a backslash."""
    escaped: set[str] = set()
    written = {start: what for start, _, _, what in pieces}
    ends = ends_of_tags(
        (start, _name(what), kind == "end") for start, _, kind, what in pieces if kind in ("start", "end")
    )

    def add(end: int) -> None:
        nonlocal position
        for match in _FOOTNOTE.finditer(source[:end], position):
            builder.add(source[position : match.start()])
            builder.point((match[0], ""))
            position = match.end()
        text = source[position:end]
        builder.add(text.rstrip(" ") if source[end : end + 1] == "\n" else text)

    for start, end, kind, what in pieces:
        if start < position:
            continue
        add(start)
        if kind == "text":
            builder.add(what)
            escaped |= {what} if source[start] == "\\" and what != "\n" else set()
        elif start in ends:
            builder.open((what, written[ends[start]]))
        elif start in ends.values():
            builder.close()
        else:
            builder.point((what, ""), what if kind == "keep" else "")
        position = end
    add(len(source))
    return escaped


def _name(tag: str) -> str:
    """Return the name of a tag of HTML; other marks have none."""
    name = re.match(r"</?([A-Za-z][\w-]*)", tag)
    return name[1] if name else ""


def _written(nodes: list[Node], things: list[Any], escaped: set[str], line_break: str) -> str:
    parts = []
    for node in nodes:
        if isinstance(node, str):
            text = "".join(f"\\{character}" if character in escaped else character for character in node)
            parts.append(text.replace("\n", line_break))
        else:
            before, after = things[node[0]]
            inner = _written(node[1], things, escaped, line_break) if after else ""
            if after and before[0] in "*_~":  # marks of emphasis have no space and no emptiness inside
                text = inner.strip()
                start = len(inner) - len(inner.lstrip())
                inner = f"{inner[:start]}{before}{text}{after}{inner[start + len(text) :]}" if text else inner
                parts.append(inner)
            else:
                is_joined = before.startswith("`") and bool(parts) and parts[-1].endswith("`")
                parts.append(" " * is_joined + before + inner + after)
    return "".join(parts)
