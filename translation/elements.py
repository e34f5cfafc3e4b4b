"""Sentences of HTML and XML: text and elements inside of each other, read as a text with marks."""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from sightline.base.text.sentences import has_letter
from sightline.translation.files.document import ends_of_tags
from sightline.translation.marks import SPACE, Node, TextBuilder, Texts, TranslatedText, nodes_of

INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # characters that no XML has
# Elements at the start and at the end of a part, as XLIFF, DOCX and ODT have them.
_ENDS = {
    "ept": "bpt", "ec": "sc", "bookmarkEnd": "bookmarkStart", "commentRangeEnd": "commentRangeStart",
    "bookmark-end": "bookmark-start", "reference-mark-end": "reference-mark-start", "fldChar end": "fldChar begin",
}  # fmt: skip
PAIR = "sightline-pair"  # an element around both that exists only during a translation
# Returns the text for which an element stands that is copied as a whole; None if its text is
# translated.
StandsFor = Callable[[Any], str | None]


def add_content(
    texts: Texts, parent: Any, after: Any, nodes: Sequence[Any], stands_for: StandsFor, *, collapses: bool
) -> None:
    """Add the text of some children of an element, and of what is between and around them.

    `after` is the child before them; None for the start. Whitespace is one space if it `collapses`,
    and stays as it is at the ends.
    """
    from lxml import etree

    builder, siblings = TextBuilder(collapses=collapses), _with_pairs(nodes)

    first = (parent.text if after is None else after.tail) or ""
    builder.add(first)
    for node in siblings:
        _add_element(builder, node, stands_for)
        builder.add(node.tail or "")
    text = builder.finish()
    last = (siblings[-1].tail or "") if siblings else first
    edges = (first[: len(first) - len(first.lstrip())], last[len(last.rstrip()) :]) if collapses else ("", "")

    def write(result: TranslatedText) -> None:
        for node in siblings:
            parent.remove(node)
        if after is None:
            parent.text = edges[0]
        else:
            after.tail = edges[0]
        _fill(parent, after, [*nodes_of(text, result), edges[1]], builder.things, stands_for)
        separate()

    def separate() -> None:
        if any(thing.tag == PAIR for thing in builder.things):
            etree.strip_tags(parent, PAIR)

    if has_letter(text.text):
        texts.add(text, write, builder.things)
    else:
        separate()


def _add_element(builder: TextBuilder, element: Any, stands_for: StandsFor) -> None:
    text = stands_for(element)
    if text is not None:
        builder.point(element, SPACE.sub(" ", text) if text.strip() and builder.collapses else text)
        return
    builder.open(element)
    builder.add(element.text or "")
    for child in list(element) if element.tag == PAIR else _with_pairs(list(element)):
        _add_element(builder, child, stands_for)
        builder.add(child.tail or "")
    builder.close()


def _with_pairs(nodes: Sequence[Any]) -> list[Any]:
    """Put each start, its end and what is between them into an element; return the nodes then."""
    joined, tags = list(nodes), list[tuple[int, str, bool]]()
    for at, node in enumerate(nodes):
        thing = next(node.iterchildren("{*}fldChar"), node)
        values = {key.rpartition("}")[2]: value for key, value in thing.attrib.items()}
        name = f"{str(thing.tag).rpartition('}')[2]} {values.get('fldCharType', '')}".rstrip()
        if name in _ENDS or name in _ENDS.values():
            key = next((values[each] for each in ("startRef", "rid", "id", "name") if each in values), "")
            tags.append((at, f"{_ENDS.get(name, name)} {key}", name in _ENDS))
    for start, end in sorted(ends_of_tags(tags).items(), reverse=True):
        pair, last = nodes[start].makeelement(PAIR), joined.index(nodes[end], start)
        nodes[start].addprevious(pair)
        pair.tail, nodes[end].tail = nodes[end].tail, None
        pair.extend(joined[start : last + 1])
        joined[start : last + 1] = [pair]
    return joined


def _fill(parent: Any, last: Any, nodes: Sequence[Node], things: Sequence[Any], stands_for: StandsFor) -> None:
    """Add texts and elements to an element, after its child `last`; None for its start."""
    for node in nodes:
        if isinstance(node, str):
            text = INVALID.sub("", node)
            if last is None:
                parent.text = (parent.text or "") + text or None
            else:
                last.tail = (last.tail or "") + text or None
            continue
        element = things[node[0]]
        if element.getparent() is not None:  # it occurs before: its mark is split
            element = copy.copy(element)
            element.attrib.pop("id", None)
        if stands_for(element) is None:
            element.text, element[:] = None, []
            _fill(element, None, node[1], things, stands_for)
        element.tail = None
        parent.insert(0 if last is None else parent.index(last) + 1, element)
        last = element
