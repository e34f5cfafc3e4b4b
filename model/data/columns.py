"""Fields of records from the columns of tables and the fields of JSON objects that users have.

A field is read from the column that the user names, or else from the column of its name, or else
from the only one of its `SYNONYMS`. Case makes no difference. Other columns are ignored.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.base.text.languages import find_language, language_name
from sightline.model.data.files import PAIR, TABLES, TSV
from sightline.model.data.records import TaskName

if TYPE_CHECKING:
    from sightline.model.data.formats import Reading

# BCP 47, without the rare forms; private tags begin with x-. The export writes the usual case.
LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{1,8})*|[Xx](-[A-Za-z0-9]{1,8})+")
SIDES = ("src", "tgt", "trg")  # names of columns and endings of files that are no tags of languages
FIELDS: Mapping[TaskName, tuple[str, ...]] = {
    "classification": ("text", "label"),
    "language-model": ("text",),
    "translation": ("source", "target"),
    "encoder": ("source", "target"),
    "reranking": ("source", "target"),
    "tagging": (),
}
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "text": ("sentence", "utterance", "content", "message", "review"),
    "label": ("category", "intent", "class", "topic", "sentiment"),
    "source": ("src",),
    "target": ("tgt", "trg"),
}
_SHOWN = 12  # names in a message


def is_language(name: str) -> bool:
    return LANGUAGE_TAG.fullmatch(name) is not None and name.lower() not in SIDES


class Columns:
    """Names of the columns of a table, or of the fields of JSON objects, which become those of
    records. Raises `ValueError` for names that are missing.
    """

    def __init__(self, reading: "Reading", ending: str) -> None:
        """`ending` is that of the format."""
        self._task, self._ending, self._fields = reading.task, ending, FIELDS[reading.task]
        self._kind = "column" if ending in TABLES else "field"
        self._given = {field: name for field in self._fields if (name := getattr(reading, field)) is not None}
        self._names: tuple[str, ...] = ()  # in the last row
        self._renames: dict[str, str] = {}  # of the last row: fields of a record that have other names in the file
        self._is_unnamed = False  # the first row is data

    def name(self, rows: Sequence[Sequence[str]]) -> list[str] | None:
        """Return the names of the columns of a table with these first rows; None if the first row
        has them.

        Columns have numbers if the user names them so. The first columns of pairs with tabs are
        source and target if no cell is a known name or a language. Two columns without known names
        are `text` and `label` if the first cell of one of them, the label, occurs in it again.
        """
        first, given = [cell.strip().casefold() for cell in rows[0]], self._given.values()
        known = {name for field in self._fields for name in (field, f"{field}s", *SYNONYMS[field])}
        known |= {name.casefold() for tag in given for name in (tag, language_name(tag))}
        names = None
        if given and all(map(str.isdecimal, given)):
            names = [str(number) for number in range(1, len(first) + 1)]
        elif self._ending == TSV and "source" in self._fields:
            is_tatoeba = [cell.isdecimal() for cell in first] == [True, False, True, False]
            pair = ["", PAIR[0], "", PAIR[1]] if is_tatoeba else PAIR  # after the numbers of the sentences
            names = None if any(cell in known or language_name(cell) != cell for cell in first) else pair
        elif self._task == "classification" and not given and len(first) == 2 and not known & {*first}:
            columns = [[row[index] for row in rows if len(row) == 2] for index in (0, 1)]
            repeated = [index for index in (1, 0) if columns[index].count(rows[0][index]) > 1]
            label = min(repeated, key=lambda index: (len({*columns[index]}), sum(map(len, columns[index]))), default=2)
            names = [["label", "text"], ["text", "label"], None][label]
        self._is_unnamed = names is not None
        return names

    def rename(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a row by the names of the fields of a record, with all others."""
        pair = fields.get("translation")
        if self._task == "translation" and isinstance(pair, dict):
            fields = pair  # as in data sets of Hugging Face: one text for each language
        if (names := tuple(fields)) != self._names:
            self._names, self._renames = names, {}
            self._renames = self._find(names)
        if not self._renames:
            return fields
        others = {name: value for name, value in fields.items() if name not in self._renames.values()}
        return others | {field: fields[name] for field, name in self._renames.items()}

    def _find(self, names: Sequence[str]) -> dict[str, str]:
        """Return the names of the fields of a record that have other ones in the file."""
        by_key = {name.casefold(): name for name in reversed(names)}
        given = {
            field: name
            if name in names
            else by_key.get(name.casefold(), by_key.get(language_name(name).casefold()))
            or (find_language(name, names) if field in PAIR and is_language(name) else None)
            for field, name in self._given.items()
        }
        if not any(given.values()) and PAIR[0] in given and all(map(is_language, self._given.values())):
            given = {}  # languages of the columns source and target
        renames = {}
        for field in self._fields:
            if field in given:
                if (found := given[field]) is None:
                    name = self._given[field][:40]
                    tag = ", and it is no tag of a language such as en" * (field in PAIR and not is_language(name))
                    raise ValueError(f"no {self._kind} {name!r}, which --{field} names{tag}; {_there_are(names)}")
            else:
                same = [name for name in (field, f"{field}s") if name in names]
                others = [by_key[name] for name in SYNONYMS[field] if name in by_key]
                found = (
                    same or by_key.get(field) or by_key.get(f"{field}s") or (others[0] if len(others) == 1 else None)
                )
            if isinstance(found, str) and field != found:
                renames[field] = found
        return renames

    def missing(self) -> str:
        """Return what to do if the last row lacks a field."""
        names = self._names
        absent = [field for field in self._fields if not {field, f"{field}s"} & {*self._renames, *names}]
        flags = [f"--{field} {self._kind.upper()}" for field in absent]
        tags = [name for name in names if is_language(name)]
        if "source" in absent and len(tags) == 2:
            flags = [f"--source {tags[0]}", f"--target {tags[1]}"]
        way_out = f"; name the right ones with {' '.join(flags)}" if flags else ""
        if self._kind == "column" and not self._renames:
            numbers = " ".join(f"--{field} {number}" for number, field in enumerate(self._fields, start=1))
            way_out += f"; if the first line is data, number the columns, such as {numbers}"
        return f"{_there_are(names)}{way_out}"

    def notes(self, path: Path, used: Collection[str]) -> list[str]:
        """Return how a file with these names is read; `used` are fields of records."""
        renames = self._renames
        notes = [
            f"{field} is the {self._kind} {name!r}"
            for field, name in renames.items()
            if field.casefold() != name.casefold()
        ]
        if self._is_unnamed and not renames:
            columns = " and ".join(name for name in self._names if name in self._fields)
            notes = [f"the first line is data, because it has no known names; its columns are {columns}"]
        kept = {*renames.values(), *used} - renames.keys()
        if ignored := [name for name in self._names if name not in kept]:
            notes.append(f"ignored: {_join(ignored)}")
        return [f"{path.name}: {'; '.join(notes)}"] if notes else []


def _there_are(names: Sequence[str]) -> str:
    return f"there are {_join(names) or 'none'}"


def _join(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name[:40]) for name in names[:_SHOWN]) + more
