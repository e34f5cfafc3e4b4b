"""Markdown (CommonMark with tables and strikethrough): the inline text of each block.

Lines of blocks stay as they are. The lines of a paragraph are joined, because its sentences are
translated as a whole.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sightline.base.text.sentences import has_letter
from sightline.base.text.words import Span
from sightline.translation.files.document import decode
from sightline.translation.files.strings import Replacements, add_pieces, tag_name
from sightline.translation.marks import Node, TextBuilder, TranslatedText, nodes_of

_FRONT_MATTER = re.compile(
    r"\A(?:---\r?\n.*?\r?\n(?:---|\.\.\.)|\+\+\+\r?\n.*?\r?\n\+\+\+)[ \t]*(?:\r?\n|\Z)", re.DOTALL
)
_NEWLINE = re.compile(r"\r\n|\r|\n")
_ATTRIBUTES = r"[ \t]*\{[:#.][^{}\n]*\}"
_POINT = re.compile(rf"(\[\^[^\]\s]+\]|{_ATTRIBUTES})")  # a footnote, or attributes such as {#name .class}
_TAIL = re.compile(rf"(?:{_ATTRIBUTES})?\s*\Z")
_ADMONITION = re.compile(r"(?:!!!|\?\?\?\+?|===[+!]?)[ \t]+[a-z -]*(?:\"([^\"\n]*)\")?[ \t]*$", re.MULTILINE)
# Templates in the address of a link, for whose spaces the parser gets another character.
_ADDRESS, _NO_SPACE = re.compile(r"(?<=\]\()[^\s()]*\{[{%][^{}()\n]*[}%]\}"), "\ue000"
_NOTE = re.compile(r"(?:\[\^[^\]\s]+\])?:\s+")  # the start of a footnote, or of the definition of a term
# Lines that are no text: of directives, templates, attributes, and imports of MDX.
_DIRECTIVE = re.compile(
    r"(?:(?::{3,}[^\n]*|(?:\{[{%][^{}\n]*[}%]\}[ \t]*)+|\{:[^{}\n]*\}|import [^\n]+ from ['\"][^\s'\"]+['\"];?)"
    r"[ \t]*(?:\n\s*|\Z))+"
)
_LEAD = re.compile(rf"{_DIRECTIVE.pattern}|{_NOTE.pattern}|\[[ xX]\]\s|\[![A-Z]+\]\s*")  # also of tasks and alerts
_END_TAGS = re.compile(r"(?:</[\w-]+>\s*)*")
_BLOCK = re.compile(r"\A(\s*\d*)([-+*>.)]|#{1,6})(?=\s)")  # a paragraph that would begin another block
_PREFIX = re.compile(r"[ \t>]*")
_LINE_START = re.compile(r"(?:[ \t>]|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])|#{1,6}(?=[ \t])|\|)*")


class Markdown(Replacements):
    """A Markdown file."""

    def __init__(self, data: bytes) -> None:
        from markdown_it import MarkdownIt

        super().__init__(*decode(data))
        front = _FRONT_MATTER.match(self._text)
        offset = front.end() if front else 0
        text = _ADDRESS.sub(lambda address: address[0].replace(" ", _NO_SPACE), self._text[offset:])
        self._newline = "\r\n" if "\r\n" in text else "\n"
        starts = [offset, *[offset + match.end() for match in _NEWLINE.finditer(text)]]
        lines = _NEWLINE.split(text)
        parser = MarkdownIt("commonmark", {"store_labels": True}).enable(["table", "strikethrough"])
        parser.disable("text_join")
        parser.normalizeLink = parser.normalizeLinkText = str  # type: ignore[assignment, method-assign]
        parser.block.ruler.before("paragraph", "note", _begins_note, {"alt": ["paragraph"]})
        parser.block.ruler.before("fence", "admonition", _admonition, {"alt": ["paragraph", "list", "blockquote"]})
        definitions: dict[str, Any] = {}

        def in_file(text: str) -> str:
            return text.replace("\n", self._newline)

        position, is_paragraph = offset, False
        for block in parser.parse(text, definitions):
            if block.map is None:
                continue
            if block.type.endswith("_open"):
                is_paragraph = block.type == "paragraph_open"
            start, line = starts[block.map[0]], lines[block.map[0]]
            if block.type == "html_block":
                # Its elements, such as `details`, begin or end in other blocks after empty lines.
                html, before = block.content.rstrip(), _END_TAGS.match(block.content)[0]  # type: ignore[index]
                if self._text.startswith(in_file(html), start):
                    replace = self.replace(start + len(in_file(before)), start + len(in_file(html)), in_file)
                    self.add_markup(html[len(before) :], replace, may_be_open=True)
            if block.type != "inline":
                continue
            source, escaped = block.content, set[str]()
            first, last = source.split("\n")[0].rstrip(), source.split("\n")[-1].rstrip()
            column = line.find(first, max(position - start, _LINE_START.match(line).end()))  # type: ignore[union-attr]
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
            lead = _LEAD.match(source)
            before = lead[0] if lead else ""
            after = _TAIL.search(source, len(before))[0]  # type: ignore[index]
            source = source[len(before) : len(source) - len(after)]
            (inline,) = parser.parseInline(source, definitions) if before or after else (block,)
            line_break = f"{self._newline}{prefix}"
            edges = [edge.replace("\n", line_break) for edge in (before, after)]
            self._add_inline(edges, inline, escaped, f"\\{line_break}", is_paragraph, (start, position))

    def _add_inline(
        self, edges: Sequence[str], inline: Any, escaped: set[str], line_break: str, is_paragraph: bool, span: Span
    ) -> None:
        builder, pieces, replace = TextBuilder(), list(_pieces(inline.children or ())), self.replace(*span)
        add_pieces(builder, pieces)
        escaped |= {what for kind, what in pieces if kind == "escape"}
        text = builder.finish()

        def write(result: TranslatedText) -> None:
            written = _written(nodes_of(text, result), builder.things, escaped, line_break)
            if result.text != text.text:  # such as a formula, whose lines stay
                written = _BLOCK.sub(r"\1\\\2", written) if is_paragraph else written
                replace(written.replace(_NO_SPACE, " ").join(edges))

        if has_letter(text.text):
            self.add(text, write)


def _admonition(state: Any, line: int, last: int, silent: bool) -> bool:
    """Read a note or a tab of MkDocs: `!!! note "Title"`, and the indented text after it."""
    found = _ADMONITION.match(state.src, state.bMarks[line] + state.tShift[line])
    if silent or not found or state.is_code_block(line):
        return silent and bool(found)
    token, indent, lines = state.push("inline", "", 0), state.sCount[line] + 4, (state.blkIndent, state.lineMax)
    token.content, token.map, token.children = found[1] or "", [line, line + 1], []
    end = next((at for at in range(line + 1, last) if not state.isEmpty(at) and state.sCount[at] < indent), last)
    state.blkIndent, state.lineMax = indent, end
    state.md.block.tokenize(state, line + 1, end)
    (state.blkIndent, state.lineMax), state.line = lines, end
    return True


def _begins_note(state: Any, line: int, last: int, silent: bool) -> bool:
    """Return True to end a paragraph before a line, which begins another one."""
    start = state.bMarks[line] + state.tShift[line]
    return silent and any(pattern.match(state.src, start) for pattern in (_NOTE, _DIRECTIVE))


def _pieces(tokens: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield the parts of an inline text: the kind of each, and how it is written."""
    links, waiting = list[Any](), iter(tokens)
    for token in waiting:
        content, markup = token.content, token.markup
        match token.type:
            case "text":
                parts = enumerate(_POINT.split(content))
                yield from (("point" if number % 2 else "text", part) for number, part in parts)
            case "softbreak" | "hardbreak":
                yield "text", " " if token.type == "softbreak" else "\n"
            case "text_special" if token.info == "escape":
                yield ("text", markup) if content == markup else ("escape", content)
            case "text_special":
                yield "keep", markup
            case "code_inline":
                space = " " * (content.strip(" ") != "" and content.strip("` ") != content)
                yield "keep", f"{markup}{space}{content}{space}{markup}"
            case "html_inline":
                yield "end" if content.startswith("</") else "start" if tag_name(content) else "point", content
            case "image":
                yield "point", f"![{content}]{_target(token, 'src')}"
            case "link_open" if markup == "autolink":
                yield "keep", f"<{next(waiting).content}>"
                next(waiting)
            case "link_open" if token.meta.get("label", "").startswith("^"):  # the note has one word
                yield "point", f"[{token.meta['label'].lower()}]"
                while next(waiting).type != "link_close":
                    pass
            case "link_open":
                links.append(token)
                yield "start", "["
            case "link_close":
                yield "end", f"]{_target(links.pop(), 'href')}"
            case _:
                yield "start" if token.nesting == 1 else "end", markup


def _target(token: Any, name: str) -> str:
    """Return what follows the text of a link or a picture."""
    if label := token.meta.get("label"):
        return f"[{label.lower()}]"
    url, title = token.attrs[name], token.attrs.get("title", "").replace('"', '\\"')
    if re.search(r"\s", url) or url.count("(") != url.count(")") or (title and not url):
        url = f"<{url}>"
    return f'({url} "{title}")' if title else f"({url})"


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
