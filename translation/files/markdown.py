"""Markdown (CommonMark with tables and strikethrough): the inline text of each block.

Lines of blocks stay as they are. The lines of a paragraph are joined, because its sentences are
translated as a whole.
"""

import re
import string
from collections.abc import Callable, Iterator
from typing import Any

from sightline.base.text.sentences import has_letter
from sightline.translation.files.document import Node, TextBuilder, decode, nodes_of
from sightline.translation.files.strings import Replacements
from sightline.translation.marks import TranslatedText

_FRONT_MATTER = re.compile(
    r"\A(?:---\r?\n.*?\r?\n(?:---|\.\.\.)|\+\+\+\r?\n.*?\r?\n\+\+\+)[ \t]*(?:\r?\n|\Z)", re.DOTALL
)
_NEWLINE = re.compile(r"\r\n|\r|\n")
_FOOTNOTE = re.compile(r"\[\^[^\]\s]+\]")
_LEAD = re.compile(r"\[\^[^\]\s]+\]:\s*|\[[ xX]\]\s|\[![A-Z]+\]\s*")  # of footnotes, tasks and alerts
_BLOCK = re.compile(r"\A(\s*\d*)([-+*>.)]|#{1,6})(?=\s)")  # a text that would begin another block
_PREFIX = re.compile(r"[ \t>]*")
_LINE_START = re.compile(r"(?:[ \t>]|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])|#{1,6}(?=[ \t])|\|)*")
_Piece = tuple[int, int, str, str]  # start, end, kind, and a text that depends on the kind


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
        for block in parser.parse(text):
            if block.map is None:
                continue
            start, line = starts[block.map[0]], lines[block.map[0]]
            if block.type == "html_block":
                html = block.content.rstrip()
                if self._text.startswith(html, start):
                    self.add_markup(html, self.replace(start, start + len(html)))
            if block.type != "inline":
                continue
            source, ranges, delimiters = parser.inlines.pop(0)
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
            pieces = sorted(_pieces(source, ranges, delimiters))
            self._add_inline(source, pieces, escaped, prefix, self.replace(start, position))

    def _add_inline(
        self, source: str, pieces: list[_Piece], escaped: set[str], prefix: str, replace: Callable[[str], None]
    ) -> None:
        builder = TextBuilder()
        lead = _LEAD.match(source)
        escaped = escaped | _add_pieces(builder, source, pieces, lead.end() if lead else 0)
        text = builder.finish()

        def write(result: TranslatedText) -> None:
            line_break = f"\\{self._newline}{prefix}"
            first = lead[0].replace("\n", f"{self._newline}{prefix}") if lead else ""
            written = _written(nodes_of(text, result), builder.things, escaped, line_break)
            replace(first + _BLOCK.sub(r"\1\\\2", written))

        if has_letter(text.text):
            self.add(text, write)


class _Parser:
    """Parses blocks, and records which part of an inline text each rule reads."""

    def __init__(self) -> None:
        from markdown_it import MarkdownIt, rules_inline

        # Of each inline text: itself, the parts that rules read, and tokens of delimiters by place.
        self.inlines: list[tuple[str, list[tuple[str, int, int, int]], dict[int, Any]]] = []
        self._is_inside = False
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
        if self._is_inside:  # the text of a picture
            count = len(self.inlines[-1][1]), dict(self.inlines[-1][2])
            tokens = self._parse(source, *rest)
            del self.inlines[-1][1][count[0] :]
            self.inlines[-1][2].clear()
            self.inlines[-1][2].update(count[1])
            return tokens
        self.inlines.append((source, [], {}))
        self._is_inside = True
        try:
            return self._parse(source, *rest)
        finally:
            self._is_inside = False

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
                    self.inlines[-1][2][place] = token
                    place += len(token.content)
            elif is_read and (name != "backticks" or len(state.tokens) > count):
                self.inlines[-1][1].append((name, start, state.pos, label))
            return is_read

        return run


def _pieces(source: str, ranges: list[tuple[str, int, int, int]], delimiters: dict[int, Any]) -> Iterator[_Piece]:
    """Yield the parts of a text that are no plain text."""
    for name, start, end, label in ranges:
        own = source[start:end]
        if name == "link":
            after = source[label:end]
            if after in ("]", "][]"):  # the text is the name of a definition
                after = f"][{source[start + 1 : label]}]"
            yield start, start + 1, "open", after
            yield label, end, "close", ""
        elif name == "newline":
            yield start, end, "text", "\n" if source[:start].endswith("  ") else " "
        elif name == "escape":
            if own[1] in string.punctuation or own[1] == "\n":
                yield start, end, "text", own[1]
        elif name == "html_inline":
            yield start, end, "html", own
        else:
            yield start, end, "point" if name == "image" else "keep", own
    for place, token in delimiters.items():
        size = len(token.markup)
        if token.nesting == 1:
            start = place - (token.markup in ("**", "__"))  # the inner one of two has the token
            yield start, start + size, "start", token.markup
        elif token.nesting == -1:
            yield place, place + size, "close", token.markup


def _add_pieces(builder: TextBuilder, source: str, pieces: list[_Piece], position: int) -> set[str]:
    """Add a text from a position to a builder; return the characters that had a backslash."""
    escaped: set[str] = set()
    closing = _pairs_of_html(pieces)
    ends = {start for start, _ in closing.values()}

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
        elif kind == "open":
            builder.open(("[", what))
        elif kind == "start":
            builder.open((what, what))
        elif kind == "close" or start in ends:
            builder.close()
        elif start in closing:
            builder.open((what, closing[start][1]))
        else:
            builder.point((what, ""), what if kind == "keep" else "")
        position = end
    add(len(source))
    return escaped


def _pairs_of_html(pieces: list[_Piece]) -> dict[int, tuple[int, str]]:
    """Return the place of the end tag, and the tag, by the place of each start tag that has one."""
    closing: dict[int, tuple[int, str]] = {}
    waiting: list[tuple[int, str]] = []  # what is open; other marks have no name
    for start, _, kind, what in pieces:
        name = re.match(r"</?([A-Za-z][\w-]*)", what) if kind == "html" else None
        if kind in ("open", "start"):
            waiting.append((start, ""))
        elif kind == "close":
            while waiting and waiting.pop()[1]:
                pass
        elif name and what.startswith("</"):
            names = [own for _, own in waiting]
            inner = names[len(names) - names[::-1].index("") :] if "" in names else names
            if name[1] in inner:
                while waiting[-1][1] != name[1]:
                    waiting.pop()
                closing[waiting.pop()[0]] = start, what
        elif name:
            waiting.append((start, name[1]))
    return closing


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
