"""Sentences of HTML and XML: text and elements inside of each other, read as a text with marks."""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from sightline.base.text.sentences import has_letter
from sightline.translation.marks import SPACE, Node, TextBuilder, Texts, TranslatedText, nodes_of

INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # characters that no XML has
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
    builder = TextBuilder(collapses=collapses)

    def add_element(element: Any) -> None:
        text = stands_for(element)
        if text is not None:
            builder.point(element, SPACE.sub(" ", text) if text.strip() and collapses else text)
            return
        builder.open(element)
        builder.add(element.text or "")
        for child in element:
            add_element(child)
            builder.add(child.tail or "")
        builder.close()

    first = (parent.text if after is None else after.tail) or ""
    builder.add(first)
    for node in nodes:
        add_element(node)
        builder.add(node.tail or "")
    text = builder.finish()
    last = (nodes[-1].tail or "") if nodes else first
    edges = (first[: len(first) - len(first.lstrip())], last[len(last.rstrip()) :]) if collapses else ("", "")

    def write(result: TranslatedText) -> None:
        for node in nodes:
            parent.remove(node)
        if after is None:
            parent.text = edges[0]
        else:
            after.tail = edges[0]
        _fill(parent, after, [*nodes_of(text, result), edges[1]], builder.things, stands_for)

    if has_letter(text.text):
        texts.add(text, write, builder.things)


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
