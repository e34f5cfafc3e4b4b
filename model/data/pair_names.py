"""Files of a corpus, which may be two for the sides of pairs, and the direction of a translation.

The sides of pairs are files whose names differ in one part, which is a language or a role:
`train.de-CH` and `train.en`, `europarl.de.txt` and `europarl.en.txt`, `src-train.txt` and
`tgt-train.txt`. Roles and XLIFF state the direction. The user names all others.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations
from pathlib import Path
from typing import TypeAlias

from sightline.base.text.languages import find_language, language_name
from sightline.model.data.columns import LANGUAGE_TAG, SIDES
from sightline.model.data.files import GZIP, READERS, CorpusError, ending_of, read_rows
from sightline.model.data.formats import Reading, by_language
from sightline.model.data.pair_files import XML, languages_in

SPLIT_NAMES = {"train": ("train",), "dev": ("dev", "val", "valid", "validation"), "test": ("test",)}
ROLES = ({"src", "source"}, {"tgt", "trg", "target"})

_SEPARATORS = "._-"
_ENDINGS = {"", "txt", "gz"}  # parts of names that say nothing about the content

# Files of a split by the part of their names that differs; one file with all has the part "".
Sides: TypeAlias = Mapping[str, Path]


def groups_of(folder: Path, reading: Reading) -> dict[str, Sides]:
    """Return the files of a folder whose names differ in one part that may be a language or a role,
    by their names with * for that part.
    """
    groups = defaultdict[str, dict[str, Path]](dict)
    for path in sorted(folder.iterdir()):
        if path.is_file() and ending_of(path) not in XML:
            for pattern, side in _parts(path.name, {reading.source, reading.target}):
                groups[pattern].setdefault(side, path)
    return dict(groups)


def _parts(name: str, named: set[str | None]) -> Iterator[tuple[str, str]]:
    """Yield the parts of a name that may be sides: the last first, and of these the longest."""
    ends = [index for index, character in enumerate(name) if character in _SEPARATORS]
    for end in (len(name), *reversed(ends)):
        for start in (0, *(index + 1 for index in ends if index < end)):
            side = name[start:end]
            if side in named or _is_role(side) or _is_language(side):
                yield f"{name[:start]}*{name[end:]}", side


def _is_role(side: str) -> bool:
    return any(side.lower() in role for role in ROLES)


def _is_language(side: str) -> bool:
    tag = side.replace("_", "-")
    language = tag.split("-")[0]
    is_known = len(language) <= 2 or language_name(language) != language  # also "cz", which is no language
    is_split = not {name for names in SPLIT_NAMES.values() for name in names}.isdisjoint(tag.lower().split("-"))
    is_known &= language not in SIDES and not is_split
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


def sides_in(folder: Path, reading: Reading, formats: Sequence[str], has_pairs: bool) -> dict[str, Sides]:
    """Return the files of each split of a folder. A folder without splits may have one translation
    memory, or two files, of any name. Raises `CorpusError` if two are candidates for a split.
    """
    groups, found = groups_of(folder, reading) if has_pairs else {}, dict[str, Sides]()
    for split, names in SPLIT_NAMES.items():
        paths = [path for name in names for ending in formats if (path := folder / f"{name}{ending}").is_file()]
        if reading.task != "language-model" and len(paths) > 1:
            paths = [path for path in paths if path.suffix != ".txt"]
        sides = [
            sides
            for pattern, sides in groups.items()
            if [*({*re.split(r"[._\-*]", pattern)} - _ENDINGS)] in [[name] for name in names]
        ]
        candidates: list[Sides] = [*({"": path} for path in paths), *(one for one in sides if len(one) > 1)]
        if len(candidates) > 1:
            first, second = (" and ".join(path.name for path in one.values()) for one in candidates[:2])
            raise CorpusError(f"{folder} has two candidates for {split}, {first} and {second}; remove one of them")
        if not candidates and any("" not in one for one in found.values()):
            candidates = sides[:1]  # whose other side is missing
        if candidates:
            found[split] = candidates[0]
    if found or not has_pairs:
        return found
    # Sides such as zh_CN and zh_TW differ in two parts; the longest comes first.
    pairs = {tuple(sides.values()): sides for sides in reversed(groups.values()) if len(sides) > 1}
    memories: list[Sides] = [{"": path} for path in folder.iterdir() if ending_of(path) in XML]
    candidates = [*pairs.values(), *memories]
    return {"train": candidates[0]} if len(candidates) == 1 else {}


def with_direction(
    data: Path, splits: Mapping[str, Sides], reading: Reading
) -> tuple[Reading, dict[str, tuple[Path, ...]]]:
    """Return a reading with the languages of source and target, if they are known, and the files of
    each split in this order.
    """
    chosen, files = None, dict[str, tuple[Path, ...]]()
    for split, sides in splits.items():
        if path := sides.get(""):
            reading = _with_languages_in(path, reading)
            files[split] = (path,)
            continue
        if chosen is None:
            chosen = _choose_sides(data, sides, reading)
            reading = _with_sides(reading, chosen)
        if not sides.keys() >= {*chosen}:
            present = " and ".join(path.name for path in sides.values())
            needed = f"{' and '.join(chosen)} as train; add, rename or remove files"
            raise CorpusError(f"{split} has {present}, but needs {needed}")
        files[split] = sides[chosen[0]], sides[chosen[1]]
    return reading, files


def _with_languages_in(path: Path, reading: Reading) -> Reading:
    """Return a reading with the languages of the texts of TMX and XLIFF, or with the other column
    of a table, if the user names one of two, or one of those that are languages.
    """
    ending, wanted = ending_of(path), (reading.source, reading.target)
    if ending in XML and not all(wanted):
        names, declared = languages_in(path)
        if declared and "" in declared:
            raise CorpusError(f"{path} states no target language; name it with --source {declared[0]} --target TAG")
        return _with_sides(reading, declared if declared and not any(wanted) else _choose_sides(path, names, reading))
    if ending in READERS and bool(reading.source) != bool(reading.target):
        _, fields = next(iter(read_rows(path, ending, reading.encoding)), (0, {}))
        names = list(by_language(fields))
        if len(names) != 2 or not any(_find(side, names) for side in wanted):
            names = [name for name in names if _is_language(name) and name.lower() != "id"]  # seldom Indonesian
        return _with_sides(reading, _choose_sides(path, names, reading)) if len(names) > 1 else reading
    return reading


def _choose_sides(data: Path, sides: Iterable[str], reading: Reading) -> tuple[str, str]:
    """Return the sides of source and target, as names of files or units of a file have them. Raises
    `CorpusError` if the user must name them.
    """
    tags, wanted = list(sides), (reading.source, reading.target)
    by_role = tuple(tag for role in ROLES for tag in tags if tag.lower() in role)
    if len(by_role) == 2 and _is_role(by_role[0]):
        return by_role[0], by_role[1]
    found = [_find(tag, tags) for tag in wanted]

    def fits(tag: str, index: int) -> bool:
        """Return whether a tag may be the source (0) or the target (1)."""
        if wanted[index] is not None:
            return tag == found[index]
        return _find(wanted[1 - index], [tag]) is None or len(tags) == 2

    fitting = [pair for pair in permutations(tags, 2) if fits(pair[0], 0) and fits(pair[1], 1)]
    if len(fitting) == 1 and any(wanted):
        return fitting[0]
    absent = " and ".join(tag for tag, side in zip(wanted, found, strict=True) if tag and not side)
    command = f"sightline train {reading.task} {shlex.quote(str(data))} --run RUN"
    options = (
        f"{command} --source {one.replace('_', '-')} --target {other.replace('_', '-')}"
        for one, other in islice(fitting or permutations([*tags, "OTHER"], 2), 2)
    )
    raise CorpusError(
        f"the languages of {data} are {', '.join(tags)}{f', but not {absent}' if absent else ''}; name the direction: "
        + ", or ".join(options)
    )


def _find(wanted: str | None, tags: Sequence[str]) -> str | None:
    return wanted if wanted is None or wanted in tags else find_language(wanted, tags)


def _with_sides(reading: Reading, sides: tuple[str, str]) -> Reading:
    """Return a reading with the tags of source and target that the user or else the sides name;
    roles are no tags.
    """
    named = (reading.source or sides[0], reading.target or sides[1])
    tags = (side.replace("_", "-") if _is_language(side) else side for side in named)
    source, target = (None if _is_role(tag) else tag for tag in tags)
    return replace(reading, source=source, target=target)
