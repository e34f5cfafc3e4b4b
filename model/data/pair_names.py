"""The two files of pairs of texts, and the direction of a translation.

The sides of pairs are files whose names differ in one part, which is a language or a role:
`train.de-CH` and `train.en`, `europarl.de.txt` and `europarl.en.txt`, `src-train.txt` and
`tgt-train.txt`. Roles and XLIFF state the direction. The user names all others.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from sightline.base.text.languages import find_language, language_name
from sightline.model.data.columns import LANGUAGE_TAG, SIDES
from sightline.model.data.files import GZIP, CorpusError, ending_of, read_rows
from sightline.model.data.formats import Reading
from sightline.model.data.pair_files import XML, languages_in

ROLES = ({"src", "source"}, {"tgt", "trg", "target"})

_SEPARATORS = "._-"
_SPLITS = {"train", "dev", "val", "valid", "test"}  # parts of names that are no subtags
_ENDINGS = {"", "txt", "gz"}  # parts of names that say nothing about the content

Sides: TypeAlias = Mapping[str, Path]  # files by the part of their names that differs


def groups_of(folder: Path, reading: Reading) -> dict[str, Sides]:
    """Return the files of a folder whose names differ in one part that may be a language or a role,
    by their names with * for that part.
    """
    groups = defaultdict[str, dict[str, Path]](dict)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not is_units(path):
            for pattern, side in _parts(path.name, {reading.source, reading.target}):
                groups[pattern].setdefault(side, path)
    return dict(groups)


def _parts(name: str, named: set[str | None]) -> Iterator[tuple[str, str]]:
    """Yield the parts of a name that may be sides: the last first, and of these the longest."""
    ends = [index for index, character in enumerate(name) if character in _SEPARATORS]
    for end in (len(name), *reversed(ends)):
        for start in (0, *(index + 1 for index in ends if index < end)):
            side = name[start:end]
            if side in named or any(side.lower() in role for role in ROLES) or _is_language(side):
                yield f"{name[:start]}*{name[end:]}", side


def _is_language(side: str) -> bool:
    tag = side.replace("_", "-")
    language = tag.split("-")[0]
    is_known = len(language) <= 2 or language_name(language) != language  # also "cz", which is no language
    is_known &= language not in SIDES and not _SPLITS.intersection(tag.lower().split("-"))
    return is_known and side not in _ENDINGS and LANGUAGE_TAG.fullmatch(tag) is not None


def sides_of(path: Path, reading: Reading) -> Sides | None:
    """Return the file and those with which it may be a pair; None if its name has no part that may
    be a side. Raises `CorpusError` if there are no others.
    """
    groups, parts = groups_of(path.parent, reading), list(_parts(path.name, {reading.source, reading.target}))
    sides = next((groups[pattern] for pattern, _ in parts if len(groups[pattern]) > 1), None)
    if sides is None and parts and parts[0][0].removesuffix(GZIP).endswith("*"):
        other = parts[0][0].replace("*", "en" if parts[0][1] != "en" else "de")
        raise CorpusError(
            f"{path} is one side of pairs, but {path.parent} has no file for the other, such as {other}; add it"
        )
    return sides


def sides_of_split(groups: Mapping[str, Sides], names: Sequence[str]) -> list[Sides]:
    """Return the files of a split that has one of some names, such as "dev" and "val"."""
    parts = {pattern: set(re.split(r"[._\-*]", pattern)) - _ENDINGS for pattern in groups}
    return [sides for pattern, sides in groups.items() if parts[pattern] in [{name} for name in names]]


def both_sides(split: str, sides: Sides, chosen: tuple[str, str]) -> tuple[Path, Path]:
    """Return the files of source and target of a split."""
    if not sides.keys() >= {*chosen}:
        present = " and ".join(path.name for path in sides.values())
        raise CorpusError(
            f"{split} has {present}, but needs {' and '.join(chosen)} as train; add, rename or remove files"
        )
    return sides[chosen[0]], sides[chosen[1]]


def choose_sides(data: Path, sides: Iterable[str], reading: Reading) -> tuple[str, str]:
    """Return the sides of source and target, as names of files or units of a file have them. Raises
    `CorpusError` if the user must name them.
    """
    tags, wanted = list(sides), (reading.source, reading.target)
    by_role = [next((tag for tag in tags if tag.lower() in role), None) for role in ROLES]
    found = by_role if all(by_role) else [_find(tag, tags) for tag in wanted]
    commands: list[tuple[str, str]] = []
    for one, other in ((0, 1), (1, 0)):
        others = [tag for tag in tags if _find(wanted[one], [tag]) is None]
        if (tag := found[one]) is not None and wanted[other] is None:
            if len(others) == 1:
                found[other] = others[0]  # one of two languages determines the other
            commands = [(tag, name) if one == 0 else (name, tag) for name in others[:2]]
    if found[0] is not None and found[1] is not None and found[0] != found[1]:
        return found[0], found[1]
    absent = " and ".join(tag for tag, side in zip(wanted, found, strict=True) if tag and not side)
    ordered = sorted(tags, key=lambda tag: tag not in found)  # those that the user names first
    first, second = [*ordered, "OTHER"][:2]
    command = f"sightline train {reading.task} {shlex.quote(str(data))} --run RUN"
    options = (
        f"--source {one.replace('_', '-')} --target {other.replace('_', '-')}"
        for one, other in commands or [(first, second), (second, first)]
    )
    raise CorpusError(
        f"the languages of {data} are {', '.join(tags)}{f', but not {absent}' if absent else ''}; name the direction: "
        + ", or ".join(f"{command} {names}" for names in options)
    )


def _find(wanted: str | None, tags: Sequence[str]) -> str | None:
    return wanted if wanted is None or wanted in tags else find_language(wanted, tags)


def with_languages(reading: Reading, sides: tuple[str, str]) -> Reading:
    """Return a reading with the tags of source and target that the user or else the sides name;
    roles are no tags.
    """
    tags = reading.source or sides[0], reading.target or sides[1]
    if any(tag.lower() in role for tag, role in zip(tags, ROLES, strict=True)):
        return reading
    return replace(reading, source=tags[0].replace("_", "-"), target=tags[1].replace("_", "-"))


def reading_of_units(path: Path, reading: Reading) -> Reading:
    """Return a reading with the tags of source and target of a TMX or XLIFF file."""
    if reading.source and reading.target:
        return reading
    tags, declared = languages_in(path)
    if declared and "" in declared:
        raise CorpusError(f"{path} states no target language; name it with --source {declared[0]} --target TAG")
    if not declared or reading.source or reading.target:
        declared = choose_sides(path, tags, reading)
    return replace(reading, source=reading.source or declared[0], target=reading.target or declared[1])


def reading_of_table(path: Path, reading: Reading) -> Reading:
    """Return a reading with the other column or field of a table, if the user names one of two, or
    one of those that are languages.
    """
    _, fields = next(iter(read_rows(path, ending_of(path), reading.encoding)), (0, {}))
    pair = fields.get("translation")
    names = list(pair if isinstance(pair, dict) else fields)
    if len(names) != 2 or not any(_find(side, names) for side in (reading.source, reading.target)):
        names = [name for name in names if _is_language(name) and name.lower() != "id"]  # seldom Indonesian
    if len(names) < 2:
        return reading
    found = choose_sides(path, names, reading)
    sides = reading.source or found[0], reading.target or found[1]
    source, target = (side.replace("_", "-") if _is_language(side) else side for side in sides)
    return replace(reading, source=source, target=target)


def is_units(path: Path) -> bool:
    """Return whether a file is TMX or XLIFF, whose units name the languages of their texts."""
    return ending_of(path) in XML
