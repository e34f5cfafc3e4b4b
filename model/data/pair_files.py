"""Pairs of texts in files of translators.

    .tmx                                            translation memories, TMX 1.1 to 1.4
    .xlf, .xliff, .sdlxliff, .mqxliff, .mxliff      XLIFF 1.2 and 2

XML is parsed as a stream: one unit at a time is in memory. Inline codes are left out, their
surroundings stay. Entities of a document are rejected, because they may expand without limit.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from html import unescape
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sightline.base.text.languages import find_language
from sightline.model.data.files import CorpusError, at, open_file

XML = (".tmx", ".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff")

_SCANNED_UNITS = 1_000  # whose languages are compared
_UNITS = ("tu", "trans-unit", "segment")
_LANGUAGES = {"xliff": ("srcLang", "trgLang"), "file": ("source-language", "target-language")}
_NATIVE_CODE = ("bpt", "ept", "it", "ph", "ut", "sub")  # their content is no text
_NOT_TRANSLATED = re.compile("initial|new|needs-(translation|l10n|adaptation)")  # states of XLIFF


class _Unit(NamedTuple):
    line: int
    texts: dict[str, str]  # by language
    reason: str | None  # to leave it out
    declared: tuple[str, str] | None  # languages of source and target of XLIFF, "" if it names none


def _read_units(path: Path) -> Iterator[_Unit]:
    from lxml import etree

    declared, is_first = None, True
    with open_file(path) as file:
        try:
            for event, element in etree.iterparse(
                file, ("start", "end"), resolve_entities=False, remove_comments=True, remove_pis=True
            ):
                document = element.getroottree().docinfo.internalDTD if is_first else None
                if document is not None and document.entities():
                    raise CorpusError(f"{at(path, element.sourceline)}: the file declares an entity; remove it")
                name, is_first = _name(element), False
                if event == "start":
                    source, target = _LANGUAGES.get(name, ("", ""))
                    if source in element.keys():  # noqa: SIM118 - an element contains its children
                        declared = element.get(source), element.get(target, "")
                elif name in (*_UNITS, "unit"):
                    if name in _UNITS:
                        yield _unit(element, declared)
                    element.clear()
                    while element.getprevious() is not None:
                        del element.getparent()[0]
        except etree.XMLSyntaxError as error:
            line, column = error.position
            problem = str(error.msg).rpartition(", line ")[0] or error.msg
            raise CorpusError(
                f"{at(path, line)}, column {column}: XML error: {problem}; correct the line, or export the file again"
            ) from None


def _name(element: Any) -> str:
    """Return the name of an element without its namespace; that of an entity is its text."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else element.text


def _unit(unit: Any, declared: tuple[str, str] | None) -> _Unit:
    sides = [(_language(tuv, tuv.get("lang", "")), tuv.find("{*}seg")) for tuv in unit.findall("{*}tuv")]
    if _name(unit) != "tu":
        names = zip(("source", "target"), declared or ("", ""), strict=True)
        sides = [(language or name, unit.find(f"{{*}}{name}")) for name, language in names]
    texts, reasons = dict[str, str](), [_state_of(unit)]
    for tag, side in sides:
        if side is not None:
            text = " ".join("".join(_texts(side)).split())
            texts.setdefault(_language(side, tag), text)
            reasons += [_state_of(side), None if text or not len(side) else "with only tags"]
    return _Unit(unit.sourceline, texts, next(filter(None, reasons), None), declared)


def _language(element: Any, default: str) -> str:
    return str(element.get("{http://www.w3.org/XML/1998/namespace}lang", default))


def _state_of(element: Any) -> str | None:
    return "not translated" if _NOT_TRANSLATED.match(element.get("state", "")) else None


def _texts(element: Any) -> Iterator[str]:
    """Yield the text of an element without the content of inline codes."""
    yield element.text or ""
    for child in element:
        name = _name(child)
        if name.startswith("&"):
            yield unescape(name)
        elif "lb" in (child.get("ctype"), child.get("type"), child.get("subType", "")[-2:]):
            yield " "  # a line break
        if name not in _NATIVE_CODE and not name.startswith("&"):
            yield from _texts(child)
        yield child.tail or ""


def languages_in(path: Path) -> tuple[list[str], tuple[str, str] | None]:
    """Return the languages of the first units, the most frequent first, and the direction that an
    XLIFF file declares.
    """
    counts, spelling = Counter[str](), dict[str, str]()
    units = list(islice(_read_units(path), _SCANNED_UNITS))
    for unit in units:
        counts.update(spelling.setdefault(tag.casefold(), tag) for tag in unit.texts)
    if not counts:
        raise CorpusError(f"{path} has no units with texts; check that it is a TMX or XLIFF file")
    return [tag for tag, _ in counts.most_common()], units[0].declared


def read_units(path: Path, source: str, target: str) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield the line of each unit of a TMX or XLIFF file, and its source and target, or the reason
    why it is left out.
    """
    find = lru_cache(_find_sides)
    has_pairs, tags = False, Counter[str]()
    for number, texts, reason, _ in _read_units(path):
        tags.update(texts.keys())
        sides = find(source, target, tuple(texts))
        if sides is None or reason is not None:
            yield number, reason or "without one of the languages"
            continue
        has_pairs = True
        pair = {"source": texts[sides[0]], "target": texts[sides[1]]}
        yield number, "identical" if pair["source"] == pair["target"] != "" else pair
    if not has_pairs:
        found = ", ".join(f"{tag} ({number:,})" for tag, number in tags.most_common(10))
        raise CorpusError(
            f"{path} has no unit with texts in {source} and {target}, but texts in {found or 'no language'}; name "
            "others with --source and --target"
        )


def _find_sides(source: str, target: str, tags: tuple[str, ...]) -> tuple[str, str] | None:
    first = find_language(source, tags)
    second = find_language(target, tags) or ("target" if "target" in tags else None)  # of XLIFF that names none
    return None if first is None or second is None or first == second else (first, second)
