"""Fields of records in the columns of tables and the fields of JSON objects that users have.

A field is read from the column that the user names, or else from the column of its name, or else
from the only one of its other names. Case, spaces and signs make no difference. Other columns are
ignored.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sightline.base.errors import list_of
from sightline.base.text.languages import find_language, language_name
from sightline.model.data.files import CSV, PAIR, TABLES, TSV
from sightline.model.data.records import TaskName

if TYPE_CHECKING:
    from sightline.model.data.formats import Reading

# BCP 47, without the rare forms; private tags begin with x-. The export writes the usual case.
LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{1,8})*|[Xx](-[A-Za-z0-9]{1,8})+")
SIDES = ("src", "tgt", "trg")  # names of columns and endings of files that are no tags of languages
_TEXT = {"text": ("texts", "sentence", "utterance", "content", "message", "review")}
_SIMILAR = {
    "source": ("src", "sources", "anchor", "query", "question", "sentence1", "text1", "question1", "sentencea",
               "texta", "premise"),
    "target": ("tgt", "trg", "targets", "positive", "pos", "document", "doc", "passage", "answer", "response",
               "sentence2", "text2", "question2", "sentenceb", "textb", "hypothesis"),
}  # fmt: skip
# Fields that each record of a task has, with their other names, as `key_of` returns them.
FIELDS: Mapping[TaskName, Mapping[str, tuple[str, ...]]] = {
    "classification": _TEXT | {"label": ("category", "intent", "class", "topic", "sentiment")},
    "language-model": _TEXT,
    "translation": {"source": ("src", "sources"), "target": ("tgt", "trg", "targets")},
    "encoder": _SIMILAR,
    "reranking": _SIMILAR,
    "tagging": {},
}
# Fields that a record may have. If there are several other names, the first one here counts.
_SCORE = {"score": ("scores", "label", "labels", "similarity", "similarityscore", "relevance", "relevancescore",
                    "relatednessscore", "isduplicate")}  # fmt: skip
_OPTIONAL: Mapping[TaskName, Mapping[str, tuple[str, ...]]] = {
    "encoder": _SCORE,
    "reranking": _SCORE,
    "tagging": {
        "text": (),
        "entities": ("spans", "label", "labels"),
        "tokens": ("words",),
        "ner_tags": ("tags", "labels", "ner", "label"),
    },
}
_NEGATIVE = re.compile(r"(hard)?neg(ative)?s?\d*")
_NAMES_OF_SIMILAR = (
    ", such as anchor and positive, query and document, or sentence1 and sentence2, and optionally texts that are "
    "worse than the target (negative, or negative_1, negative_2, ...) or a score"
)
_MORE = {
    "encoder": _NAMES_OF_SIMILAR,
    "reranking": _NAMES_OF_SIMILAR,
    "language-model": ", or for dialogues messages, conversations, instruction and output, or prompt and completion",
}
_SHOWN = 12  # names in a message


def key_of(name: str) -> str:
    """Return a name in lower case without spaces and signs."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def is_language(name: str) -> bool:
    return LANGUAGE_TAG.fullmatch(name) is not None and name.lower() not in SIDES


class Columns:
    """Names of the columns of a table, or of the fields of JSON objects."""

    def __init__(self, reading: "Reading", ending: str) -> None:
        """`ending` is that of the format."""
        self._reading, self._ending, self._fields = reading, ending, FIELDS[reading.task]
        self._kind = "column" if ending in TABLES else "field"
        self._given = {field: name for field in self._fields if (name := getattr(reading, field)) is not None}
        self._names: tuple[str, ...] | None = None  # in the last row
        self._found: dict[str, str] = {}  # of the last row
        self._is_guessed = False  # the first row is data

    def name(self, rows: Sequence[Sequence[str]]) -> list[str] | None:
        """Return the names of the columns of a table with these first rows; None if the first row
        has them.

        Columns have numbers if the user names them so. The first columns of pairs with tabs, or two
        columns of CSV with several words, are source and target if no cell is a known name or a
        language. Two columns without known names are `text` and `label` if the first cell of one of
        them, the label, occurs in it again.
        """
        first, given = [cell.strip().casefold() for cell in rows[0]], self._given.values()
        if given and all(map(str.isdecimal, given)):
            return [str(number) for number in range(1, len(first) + 1)]
        known = {name for field, others in self._fields.items() for name in (field, f"{field}s", *others)}
        languages = {name.casefold() for tag in given for name in (tag, language_name(tag))}
        if any(key_of(cell) in known or cell in languages for cell in first):
            return None
        names = None
        if "source" in self._fields:
            has_texts = self._ending == CSV and len(first) == 2 and all(" " in cell for cell in first)
            is_tatoeba = [cell.isdecimal() for cell in first] == [True, False, True, False]
            if (self._ending == TSV or has_texts) and all(language_name(cell) == cell for cell in first):
                names = ["", PAIR[0], "", PAIR[1]] if is_tatoeba else PAIR  # after the numbers of the sentences
        elif self._reading.task == "classification" and not given and len(first) == 2:
            columns = [[row[index] for row in rows if len(row) == 2] for index in (0, 1)]
            repeated = [index for index in (1, 0) if columns[index].count(rows[0][index]) > 1]
            label = min(repeated, key=lambda index: (len({*columns[index]}), sum(map(len, columns[index]))), default=2)
            names = [["label", "text"], ["text", "label"], None][label]
        self._is_guessed = names is not None
        return names

    def find(self, fields: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the name that each field of a record has in a row. Negatives keep their names.
        Raises `ValueError` for a field that is missing or not clear.
        """
        if (names := tuple(fields)) != self._names:
            self._found = self._find(names)
            self._names = names
        return self._found

    def _find(self, names: Sequence[str]) -> dict[str, str]:
        by_key: dict[str, list[str]] = {}
        for name in names:
            by_key.setdefault(key_of(name), []).append(name)
        optional, candidates = _OPTIONAL.get(self._reading.task, {}), dict[str, list[str]]()
        for field, others in {**self._fields, **optional}.items():
            keys = [key_of(field), "labels"] if field == "label" and self._reading.multi_label else [key_of(field)]
            own = [name for key in keys for name in by_key.get(key, ())]
            candidates[field] = own or [name for key in others for name in by_key.get(key, ())]
        candidates |= self._named(names)
        for field in self._fields:
            if len(candidates[field]) != 1:
                raise ValueError(self._problem(field, names, candidates))
        found = {field: columns[0] for field, columns in candidates.items() if columns}
        negatives = {name: name for name in names if "score" in optional and _NEGATIVE.fullmatch(key_of(name))}
        if negatives:
            found.pop("score", None)
        return found | negatives

    def _named(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the columns that the user names: exactly, or by their language."""
        by_case = {name.casefold(): name for name in reversed(names)}
        found = {
            field: name
            if name in names
            else by_case.get(name.casefold(), by_case.get(language_name(name).casefold()))
            or (find_language(name, names) if field in PAIR and is_language(name) else None)
            for field, name in self._given.items()
        }
        if not any(found.values()) and PAIR[0] in found and all(map(is_language, self._given.values())):
            return {}  # languages of the columns source and target
        for field, column in found.items():
            if column is None:
                name = self._given[field][:40]
                tag = ", and it is no tag of a language such as en" * (field in PAIR and not is_language(name))
                raise ValueError(f"no {self._kind} {name!r}, which --{field} names{tag}; there are {_join(names)}")
        return {field: [column] for field, column in found.items() if column is not None}

    def _problem(self, field: str, names: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> str:
        """Return what is wrong with a field, and what to do."""
        unclear = [one for one in self._fields if len(candidates[one]) != 1]
        flags = [f"--{one} {self._kind.upper()}" for one in unclear]
        tags = [name for name in names if is_language(name)]
        if "source" in unclear and len(tags) == 2:
            flags = [f"--source {tags[0]}", f"--target {tags[1]}"]
        problem = f"missing field {field!r}"
        if candidates[field]:
            problem = f"{' and '.join(repr(name[:40]) for name in candidates[field])} may be the {field}"
        way_out = f"name the right ones with {' '.join(flags)}"
        if "labels" in names and field == "label" and not candidates[field]:
            way_out = "add --multi-label to train with several"
        if self._kind == "column":
            numbers = " ".join(f"--{one} {number}" for number, one in enumerate(self._fields, start=1))
            way_out += f"; if the first line is data, number the columns, such as {numbers}"
        expected = " and ".join(self._fields) + _MORE.get(self._reading.task, "")
        return f"{problem}; the fields are {expected}, but there are {_join(names)}; {way_out}"

    def notes(self, file: str) -> list[str]:
        """Return how the last row was read, for the user."""
        notes = [
            f"{field} is the {self._kind} {name!r}"
            for field, name in self._found.items()
            if key_of(name) not in (key_of(field), f"{field}s")
        ]
        if self._is_guessed:
            columns = " and ".join(name for name in self._names or () if name in self._found)
            notes = [f"the first line is data, because it has no known names; its columns are {columns}"]
        if ignored := [name for name in self._names or () if name not in self._found.values()]:
            notes.append(f"ignored: {_join(ignored)}")
        return [f"{file}: {'; '.join(notes)}"] if notes else []


def _join(names: Sequence[str]) -> str:
    return list_of([repr(name[:40]) for name in names], _SHOWN) or "none"
