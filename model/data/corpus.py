"""Files and splits of a corpus.

A corpus is a folder with `train`, `dev` (also named `val`, `valid` or `validation`) and optionally
`test`, or one file. Without `dev`, some records of train become dev. `sightline.model.data.formats`
describes the formats. Pairs may be two files (`sightline.model.data.pair_names`). Files are read
again for each iteration, so that no corpus is held in memory.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sightline.model.data.columns import is_language
from sightline.model.data.files import READERS, TEXT, CorpusError, at, ending_of, open_file
from sightline.model.data.formats import PAIR_TASKS, SIMILARITY_TASKS, Reading, read_records
from sightline.model.data.pair_files import XML
from sightline.model.data.pair_names import (
    Sides,
    both_sides,
    choose_sides,
    groups_of,
    is_units,
    languages_of,
    languages_of_units,
    reading_of_units,
    sides_of,
    sides_of_split,
)
from sightline.model.data.records import LabelledRecord, PairRecord, Record, TaggedRecord, TaskName, key_of
from sightline.model.data.tagged_files import TAGGED

SPLIT_NAMES = {"train": ("train",), "dev": ("dev", "val", "valid", "validation"), "test": ("test",)}
DEV_SHARE, MAX_DEV_RECORDS = 0.05, 1_000  # of a train file that is divided
MIN_DEV_PAIRS = 4  # of an encoder, whose loss compares the pairs of a batch, or of a reranker
MIN_DEV_SCORES = 20  # of pairs with scores, which are compared with other scores
MAX_LABELS = 10_000
# What to do with files of other formats.
WAYS_OUT = {
    ".parquet": "write it as JSON Lines: python -c \"import pandas; pandas.read_parquet('FILE.parquet').to_json("
    "'FILE.jsonl', orient='records', lines=True)\"",
    ".zip": "unpack it",
}


@dataclass(frozen=True)
class Division:
    """Rule that divides the records of one file between train and dev, by a hash of their texts, so
    that equal texts are in the same part.
    """

    is_dev: bool
    seed: int
    dev: frozenset[int]  # hashes of the texts of dev

    def contains(self, record: Record) -> bool:
        return (hash_texts(key_of(record), self.seed) in self.dev) == self.is_dev


@dataclass(frozen=True)
class Split:
    """One part of a corpus. Each iteration reads its files and yields the records with text."""

    name: str  # "train", "dev" or "test"
    files: tuple[Path, ...]  # one, or two for the two sides of pairs
    reading: Reading
    part: Division | None = None  # None: all records of the files

    def __iter__(self) -> Iterator[Record]:
        return (record for _, record in self.numbered() if not isinstance(record, str))

    def numbered(self, kinds: dict[str, str] | None = None) -> Iterator[tuple[int, Record | str]]:
        """Yield the line number of each record, and the record or the reason why it is left out.

        `kinds` are the kinds of values that may not be mixed, with the location of the first of
        each; one mapping for several splits compares them.
        """
        for number, record in read_records(self.files, self.reading, kinds):
            if self.part is None:
                yield number, record
            elif isinstance(record, str):  # a record that is left out counts for train
                if not self.part.is_dev:
                    yield number, record
            elif self.part.contains(record):
                yield number, record

    def location(self, index: int) -> str:
        """Return file and line of the record with an index, such as "train.jsonl, line 7"."""
        numbers = (number for number, record in self.numbered() if not isinstance(record, str))
        for position, number in enumerate(numbers):
            if position == index:
                return self.line(number)
        raise IndexError(f"{self.name} has no record with the index {index}")

    def line(self, number: int) -> str:
        return at(str(self), number)

    def __str__(self) -> str:
        return " and ".join(path.name for path in self.files)


@dataclass(frozen=True)
class Corpus:
    """Splits of a corpus, and the facts about its files that a run records."""

    reading: Reading
    train: Split
    dev: Split
    test: Split | None
    digests: Mapping[str, str]  # SHA-256 of each file by name
    split_seed: int | None  # seed of the division into train and dev; None if the files divide them
    languages: tuple[str, str] | None = None  # tags of source and target, if they are known

    @property
    def splits(self) -> tuple[Split, ...]:
        return (self.train, self.dev) if self.test is None else (self.train, self.dev, self.test)


def open_corpus(data: Path, reading: Reading, split_seed: int = 1) -> Corpus:
    """Find the files of a corpus, and divide train if there is no dev, with a seed, for which it is
    read once. Records are checked while they are read.

    Raises:
        CorpusError: a file is missing or cannot be read, or two files are candidates for a split.
    """
    task, source, target = reading.task, reading.source, reading.target
    if (source or target) and task not in PAIR_TASKS:
        raise CorpusError(f"source and target are languages of {' and '.join(PAIR_TASKS)}; omit them for {task}")
    # Language tags have no case, but other endings of files do.
    sides = [side.lower() if task == "translation" else side for side in (source, target) if side is not None]
    if len(sides) > len(set(sides)):
        raise CorpusError(f"source and target must be different languages, got {source} for both")
    if reading.multi_label and task != "classification":
        raise CorpusError(f"several labels a text are possible for classification only; omit the option for {task}")
    languages = (source, target) if source and target else None
    files: dict[str, tuple[Path, ...]] = {}
    if data.is_file():
        languages, files["train"] = _files_of(data, reading)
    elif data.is_dir():
        languages, files = _find_files(data, reading)
    else:
        raise CorpusError(f"missing file or folder {data}; {_expected(task)}")
    if languages is None and (source or target):
        raise CorpusError(f"one language of {data} is given, {source or target}; give both, source and target, or none")
    reading = reading_of_units(files, reading, languages)
    splits = {name: Split(name, paths, reading) for name, paths in files.items()}
    digests = {path.name: _digest(path) for split in splits.values() for path in split.files}
    is_divided = "dev" not in splits
    if is_divided:
        splits["train"], splits["dev"] = _divide(splits["train"], split_seed)
    return Corpus(
        reading,
        splits["train"],
        splits["dev"],
        splits.get("test"),
        digests,
        split_seed if is_divided else None,
        languages if languages and (task == "encoder" or all(map(is_language, languages))) else None,
    )


def open_held_out(data: Path, reading: Reading) -> Split:
    """Find the records of a file, or of the part test, or else dev, of a folder, as `open_corpus`
    does. A folder without test and dev is divided as there.
    """
    if data.is_file():
        languages, files = _files_of(data, reading)
        return Split("test", files, reading_of_units({"test": files}, reading, languages))
    if data.is_dir():
        languages, by_split = _find_files(data, reading, needs_train=False)
        for name in ("test", "dev"):
            if name in by_split:
                return Split(name, by_split[name], reading_of_units(by_split, reading, languages))
    return open_corpus(data, reading).dev


def _formats(task: TaskName) -> tuple[str, ...]:
    if task == "tagging":
        return TAGGED
    xml = XML if task in PAIR_TASKS else ()
    return (*READERS, *xml, TEXT)


def _expected(task: TaskName) -> str:
    pairs = " or as two files, such as train.de and train.en" if task in PAIR_TASKS else ""
    *most, last = _formats(task)
    return (
        f"{task} needs a file in the format {', '.join(most)} or {last}, or a folder with the files train and, "
        f"optionally, dev and test in one of these formats{pairs}"
    )


def _files_of(data: Path, reading: Reading) -> tuple[tuple[str, str] | None, tuple[Path, ...]]:
    """Return the languages, if they are known, and the file, or both files of a pair."""
    if reading.task in PAIR_TASKS:
        if is_units(data):
            return languages_of_units(data, reading), (data,)
        sides = None if ending_of(data) in READERS else sides_of(data, reading)
        if sides is not None:
            chosen = choose_sides(data, sides, reading)
            return languages_of(chosen, reading), (sides[chosen[0]], sides[chosen[1]])
    if ending_of(data) not in _formats(reading.task):
        way_out = WAYS_OUT.get(ending_of(data), "")
        raise CorpusError(f"{data} has an unsupported format{way_out and f'; {way_out}'}; {_expected(reading.task)}")
    return (reading.source, reading.target) if reading.source and reading.target else None, (data,)


def _find_files(
    folder: Path, reading: Reading, *, needs_train: bool = True
) -> tuple[tuple[str, str] | None, dict[str, tuple[Path, ...]]]:
    """Return the languages, if they are known, and the files of each split."""
    task = reading.task
    groups = groups_of(folder, reading) if task in PAIR_TASKS else {}
    files, pairs = dict[str, tuple[Path, ...]](), dict[str, Sides]()
    for split, names in SPLIT_NAMES.items():
        candidates = [(folder / f"{name}{ending}",) for name in names for ending in _formats(task)]
        present: list[tuple[Path, ...]] = [candidate for candidate in candidates if candidate[0].is_file()]
        if task != "language-model" and len(present) > 1:
            present = [paths for paths in present if paths[0].suffix != TEXT]
        for sides in sides_of_split(groups, names):
            if len(sides) > 1:
                present.append(tuple(sides.values()))
            if present[:1] in ([], [tuple(sides.values())]):
                pairs[split] = sides
        if len(present) > 1:
            first, second = (" and ".join(path.name for path in paths) for paths in present[:2])
            raise CorpusError(f"{folder} has two candidates for {split}, {first} and {second}; remove one of them")
        if present:
            files[split] = present[0]
    if needs_train and not files and task in PAIR_TASKS:  # names without "train"
        # Sides such as zh_CN and zh_TW differ in two parts; the longest comes first.
        others = {tuple(sides.values()): sides for sides in reversed(groups.values()) if len(sides) > 1}
        memories = [path for path in folder.iterdir() if is_units(path)]
        if len(others) + len(memories) == 1:
            files["train"], pairs = tuple(memories), dict(zip(["train"], others.values(), strict=False))
    if needs_train and "train" not in files:
        present_names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "no files"
        raise CorpusError(f"missing file train in {folder}, which has {present_names}; {_expected(task)}")
    languages = (reading.source, reading.target) if reading.source and reading.target else None
    units = [path for paths in files.values() for path in paths if is_units(path)]
    if units and languages is None:
        languages = languages_of_units(units[0], reading)
    chosen = None
    for split, sides in pairs.items():
        if len(sides) > 1 and chosen is None:
            chosen = choose_sides(folder, sides, reading)
            languages = languages or languages_of(chosen, reading)
        if chosen is not None:
            files[split] = both_sides(split, sides, chosen)
    return languages, files


def _digest(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_texts(texts: Iterable[str], seed: int = 0) -> int:
    """Return a hash of 8 bytes of texts without NUL characters."""
    content = "\0".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=seed.to_bytes(8, "big")).digest(), "big")


def distinct(hashes: "array[int]") -> NDArray[np.uint64]:
    """Return different values in ascending order; `numpy.unique` takes several times the memory."""
    values = np.sort(np.frombuffer(hashes, np.uint64))
    is_first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return values[is_first]


def check_number_of_labels(number: int, split: Split) -> None:
    if number > MAX_LABELS:
        raise CorpusError(
            f"{split} has more than {MAX_LABELS:,} different labels; check that text and label are not swapped"
        )


def _divide(split: Split, seed: int) -> tuple[Split, Split]:
    """Divide the records of train between train and dev.

    About 5 % of the different texts are in dev, those with the smallest hashes, at least 1 and at
    most 1,000; for similar texts, at least `MIN_DEV_PAIRS` or `MIN_DEV_SCORES`, or half of fewer
    than twice as many. Of labelled texts, this is the share of each label, at least 1 of 2. A text
    with several labels counts for the rarest. The first text of each label stays in train.
    """
    hashes, train_only, indices = array("Q"), set[int](), dict[str, int]()
    owners, labels = array("Q"), array("L")  # text and index of each of its labels
    fewest = MIN_DEV_PAIRS if split.reading.task in SIMILARITY_TASKS else 1
    for record in split:
        hashes.append(hash_texts(key_of(record), seed))
        if isinstance(record, PairRecord) and record.score is not None:
            fewest = MIN_DEV_SCORES
        names = dict.fromkeys(record.labels) if isinstance(record, LabelledRecord | TaggedRecord) else ()
        for label in names:
            if label not in indices:
                indices[label] = len(indices)
                check_number_of_labels(len(indices), split)
                train_only.add(hashes[-1])
            owners.append(hashes[-1])
            labels.append(indices[label])
    if not hashes:
        raise CorpusError(f"{split} is empty or has only blank texts; add examples")
    different = distinct(hashes)
    fewest = max(1, min(fewest, len(different) // 2))
    share, dev = min(DEV_SHARE, MAX_DEV_RECORDS / len(different)), set[int]()
    for group in _by_label(different, owners, labels):
        candidates = (number for number in map(int, group) if number not in train_only)
        dev.update(islice(candidates, max(round(share * len(group)), fewest)))
    if len(different) < 2 or not dev:
        raise CorpusError(
            f"{split} has too few different examples ({len(different)}) to keep one for dev; add examples, or add a "
            "file dev"
        )
    part = Division(False, seed, frozenset(dev))
    return replace(split, part=part), replace(split, name="dev", part=replace(part, is_dev=True))


def _by_label(different: NDArray[np.uint64], owners: "array[int]", labels: "array[int]") -> list[NDArray[np.uint64]]:
    """Return the texts of each label in ascending order; all texts if there are no labels.

    A text counts for the rarest of its labels. Texts without any are a group of their own.
    """
    names = np.frombuffer(labels, np.dtype(labels.typecode)).astype(np.int64)
    order = np.argsort(-np.bincount(names)[names], kind="stable")
    groups = np.full(len(different), -1)
    # Of several assignments to a text, the last remains.
    groups[np.searchsorted(different, np.frombuffer(owners, np.uint64)[order])] = names[order]
    by_group = np.argsort(groups, kind="stable")
    return np.split(different[by_group], np.flatnonzero(np.diff(groups[by_group])) + 1)
