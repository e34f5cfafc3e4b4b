"""Texts with entities, from the files in which people have them.

Files of JSON have `text` and `entities`, or `tokens` and `ner_tags`; other files a word and its tag
in each line, with any columns between them, and blank lines between sentences.

Tags may be of any scheme with prefixes: IOB1, IOB2 (BIO), IOE, BILOU, BIOES. One rule reads all of
them, that of conlleval, see `entities_of_tags`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sightline.model.data.files import (
    CSV,
    NUM_FIRST_ROWS,
    TABLES,
    CorpusError,
    Row,
    at,
    check_label,
    check_text,
    kind_of,
    read_texts,
)
from sightline.model.data.records import Entity, TaggedRecord

COLUMNS = (".conll", ".bio", ".iob", ".iob2", ".bioes", ".tsv", CSV, ".txt")
TAGGED = (".jsonl", ".ndjson", ".json", *COLUMNS)
OVERLAPPING, CUT = "overlap longer entities and are left out", "begin or end within a word"

_TAG = re.compile(r"([BIMELSUW])(?:[-_](.+))?")
_BEGIN, _END = "BSUW", "ELSUW"  # prefixes of the first and of the last word of an entity
_UNNAMED = "entity"  # label of entities whose tags are only prefixes
_NO_LABEL = re.compile(r"[^\S\t]|\*|\t.*=")  # in a word and a tag without a prefix, such as a feature of CoNLL-U
_HEADER = frozenset({"tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "entity", "iob", "bio"})
_OUTSIDES = ("O", "_", "-", "")
_START, _STOP = ("start", "start_offset", "begin"), ("end", "end_offset", "stop")
_LABEL = ("label", "labels", "type", "entity_group", "entity", "tag")
# Punctuation that has no space before or after it in the texts that a served model gets, and
# characters of scripts without spaces.
_CLOSING = re.compile(r"[.,;:!?%)\]}…]+|['’](s|S|re|ve|ll|d|m|t)|n['’]t")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")


def read_columns(path: Path, ending: str, encoding: str | None = None) -> Iterator[Row]:
    """Yield words and tags of each sentence of a file with a word in each line.

    The tag is in the last column, and the word in the first one, or after numbers of words or of
    sentences. After the tags of GermEval, there are those of nested entities.
    """
    is_csv = ending == CSV
    lines = TABLES[CSV](path, encoding) if is_csv else ((n, _cells(line)) for n, line in read_texts(path, encoding))
    rows = ((number, [cell.strip() for cell in cells] or [""]) for number, cells in lines)
    start = list(islice(rows, NUM_FIRST_ROWS))
    table = [cells for _, cells in start if any(cells) and cells[0] != "-DOCSTART-"]
    # Most comments have another number of columns, so that the most frequent one counts.
    width = max(2, *Counter(map(len, table)).most_common(1)[0][:1]) if table else 2
    table = [cells for cells in table if len(cells) == width and not cells[0].startswith("#")]
    header = table.pop(0) if table and table[0][-1].lower() in _HEADER else None
    is_grouped = header is not None and header[0].lower().startswith("sentence")
    is_numbered = width > 2 and bool(table) and all(cells[0].isdecimal() for cells in table)
    word, tag = int(is_grouped or is_numbered), -1
    if is_numbered and not is_grouped and all(_is_tag(cells[2]) for cells in table):
        tag = 2
    found = {cells[tag] for cells in table} - set(_OUTSIDES)
    has_prefixes = any(map(_is_tag, found)) or not found  # without prefixes, each tag is a label
    first, group, words, tags = 1, "", list[str](), list[str]()
    for number, cells in chain(start, rows, [(0, [""])]):
        is_break = not any(cells) or cells[0] == "-DOCSTART-"
        if words and (is_break or (is_grouped and cells[0] not in ("", group))):
            yield first, {"tokens": words, "ner_tags": tags}
            words, tags = [], []
        if is_break or cells is header:
            continue
        if len(cells) == width and (
            _is_tag(cells[tag]) if has_prefixes else not _NO_LABEL.search(f"{cells[word]}\t{cells[tag]}")
        ):
            first, group = first if words else number, cells[0] or group
            words.append(cells[word])
            tags.append(cells[tag])
        elif not cells[0].startswith("#"):
            problem = f"expected {width} columns as in most lines, got {len(cells)}"
            if len(cells) == width:
                problem = f"{cells[tag][:40]!r} is no tag: it is not O and has no prefix such as B- or I-"
            raise CorpusError(
                f"{at(path, number)}: {problem}; each line needs a word and its tag, separated by a "
                f"{'comma' if is_csv else 'space or a tab'}, and sentences a blank line between them"
            )


def _cells(line: str) -> list[str]:
    line = line.rstrip()
    return line.split("\t") if "\t" in line else re.split(" +", line.strip())


def _is_tag(text: str) -> bool:
    return text in _OUTSIDES or _TAG.fullmatch(text) is not None


def entities_of_tags(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return first index, index after the last, and label of each entity of the tags of words.

    An entity begins with B, with another label than before, and after O; S, U and W are an entity
    of one word, and E and L end one. A tag without a prefix is a label.
    """
    entities, is_open = list[tuple[int, int, str]](), False
    for index, tag in enumerate(tags):
        match = _TAG.fullmatch(tag)
        prefix, label = (match[1], match[2] or _UNNAMED) if match else ("I", "" if tag in _OUTSIDES else tag)
        if is_open and prefix not in _BEGIN and entities[-1][2] == label:
            entities[-1] = (entities[-1][0], index + 1, label)
        elif label:
            entities.append((index, index + 1, label))
        is_open = bool(label) and prefix not in _END
    return entities


def join_words(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Return a text of words as people write it, and the range of characters of each word."""
    is_unspaced = all(len(word) < 2 for word in words) and any(map(_UNSPACED.search, words))
    text, ranges = "", list[tuple[int, int]]()
    for word in words:
        is_joined = is_unspaced or not text or text[-1] in "([{„" or _CLOSING.fullmatch(word)
        if not is_joined and not _UNSPACED.match(text[-1]) and not _UNSPACED.match(word):
            text += " "
        ranges.append((len(text), len(text) + len(word)))
        text += word
    return text, ranges


def without_whitespace(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the range of a part of a text without whitespace at its ends, unless it is blank."""
    part = text[start:end]
    return (end - len(part.lstrip()), start + len(part.rstrip())) if part.strip() else (start, end)


def tagged(text: str, entities: Sequence[Entity]) -> TaggedRecord:
    """Return a record with the longest of the entities that overlap, without whitespace."""
    kept, notes = list[Entity](), list[str]()
    trimmed = (Entity(*without_whitespace(text, one.start, one.end), one.label) for one in entities)
    for entity in sorted(dict.fromkeys(trimmed), key=lambda entity: (entity.start - entity.end, entity.start)):
        if not text[entity.start : entity.end].strip():
            continue
        if any(entity.start < other.end and other.start < entity.end for other in kept):
            notes.append(OVERLAPPING)
            continue
        kept.append(entity)
        sides = [text[max(0, index - 1) : index + 1] for index in (entity.start, entity.end)]
        if any(len(side) == 2 and side.isalnum() and not _UNSPACED.search(side) for side in sides):
            notes.append(CUT)
    return TaggedRecord(text, tuple(sorted(kept, key=lambda entity: entity.start)), tuple(notes))


def read_tagged(fields: Mapping[str, Any], names: Mapping[str, str]) -> TaggedRecord:
    """Return the text and the entities of a row: words and their tags, or spans of a text. Raises
    `ValueError` for values of another form.
    """
    words, tags = (fields.get(names.get(field, "")) for field in ("tokens", "ner_tags"))
    if isinstance(words, list) and tags is not None and not any(isinstance(word, dict) for word in words):
        return _of_words(words, tags, names["ner_tags"])
    if not names.keys() >= {"text", "entities"}:
        if {"data", "annotations"} <= fields.keys():
            raise ValueError("this is an export of Label Studio in JSON; export it as CONLL2003 or JSON_MIN instead")
        raise ValueError(
            f"expected a text and its entities, got {', '.join(name[:40] for name in list(fields)[:8]) or 'no field'}; "
            'a text needs "text" and "entities", a list of [start, end, label], or "tokens" and "ner_tags", a list of '
            "words and one of their tags"
        )
    text, name = check_text(fields[names["text"]], names["text"]), names["entities"]
    if not isinstance(spans := fields[name], list):
        raise ValueError(f"{name} must be a list of [start, end, label], got {kind_of(spans)}")
    return tagged(text, [_entity(text, span, f"{name}[{index}]") for index, span in enumerate(spans)])


def _of_words(words: list[Any], tags: Any, name: str) -> TaggedRecord:
    if not isinstance(tags, list) or len(tags) != len(words):
        got = f"{len(tags)} of {len(words)}" if isinstance(tags, list) else kind_of(tags)
        raise ValueError(f"{name} must be a list with a tag for each word, got {got}")
    if any(isinstance(tag, int) for tag in tags):
        raise ValueError(
            f"{name} has numbers instead of tags such as B-PER; replace each by its name, which "
            f"dataset.features[{name!r}].feature.names of the library datasets has"
        )
    text, ranges = join_words([check_text(word, "a word") for word in words])
    found = entities_of_tags([check_text(tag, name) for tag in tags])
    return tagged(text, [Entity(ranges[a][0], ranges[b - 1][1], check_label(label, name)) for a, b, label in found])


def _entity(text: str, span: Any, name: str) -> Entity:
    stated = span.get("text") if isinstance(span, dict) else None
    if isinstance(span, dict):
        span = [span.get(next(filter(span.__contains__, names), "")) for names in (_START, _STOP, _LABEL)]
    if not isinstance(span, list) or len(span) < 3:
        raise ValueError(f'{name} must be [start, end, label] or {{"start": 0, "end": 5, "label": "PER"}}')
    start, end, label = span[:3]
    counted = "start and end count characters from 0, and the end is that after the last character of the entity"
    if type(start) is not int or type(end) is not int:
        found = f"{kind_of(start)} and {kind_of(end)}"
        raise ValueError(f"start and end of {name} must be integers, got {found}; {counted}")
    if not 0 <= start < end <= len(text):
        raise ValueError(f"{name} goes from {start} to {end}, but the text has {len(text)} characters; {counted}")
    if isinstance(stated, str) and stated.split() != text[start:end].split():
        there = f"the text has {text[start:end][:40]!r} from {start} to {end}"
        raise ValueError(f"{name} is {stated[:40]!r}, but {there}; {counted}")
    label = label[0] if isinstance(label, list) and len(label) == 1 else label
    return Entity(start, end, check_label(label, f"the label of {name}"))
