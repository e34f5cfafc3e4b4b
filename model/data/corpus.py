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
from sightline.model.data.formats import PAIR_TASKS, SIMILARITY_TASKS, Findings, Reading, read_records
from sightline.model.data.pair_files import XML
from sightline.model.data.pair_names import sides_in, sides_of, with_direction
from sightline.model.data.records import LabelledRecord, PairRecord, Record, TaggedRecord, TaskName, key_of
from sightline.model.data.tagged_files import TAGGED

DEV_SHARE, MAX_DEV_RECORDS = 0.05, 1_000  # of a train file that is divided
MIN_DEV_PAIRS = 4  # of an encoder, whose loss compares the pairs of a batch, or of a reranker
MIN_DEV_SCORES = 20  # of pairs with scores, which are compared with other scores
MAX_LABELS = 10_000
# What to do with files of other formats.
WAYS_OUT = {
    ".parquet": "write it as JSON Lines: python -c \"import pandas; pandas.read_parquet('FILE.parquet').to_json("
    "'FILE.jsonl', orient='records', lines=True)\"",
    ".zip": "unpack it",
    ".po": "convert it to XLIFF, such as with po2xliff of the Translate Toolkit",
}


@dataclass(frozen=True)
class Division:
    """Rule that divides the records of one file between train and dev, by a hash of their texts, so
    that equal texts are in the same part.
    """

    is_dev: bool
    seed: int
    dev: frozenset[int]  # hashes of the texts of dev

    def contains(self, record: Record | str) -> bool:
        """Return whether a record is in this part; those that are left out count for train."""
        is_dev = not isinstance(record, str) and hash_texts(key_of(record), self.seed) in self.dev
        return is_dev == self.is_dev


@dataclass(frozen=True)
class Split:
    """One part of a corpus. Each iteration reads its files and yields the records with text."""

    name: str  # "train", "dev" or "test"
    files: tuple[Path, ...]  # one, or two for the two sides of pairs
    reading: Reading
    part: Division | None = None  # None: all records of the files

    def __iter__(self) -> Iterator[Record]:
        return (record for _, record in self.numbered() if not isinstance(record, str))

    def numbered(self, findings: Findings | None = None) -> Iterator[tuple[int, Record | str]]:
        """Yield the line number of each record, and the record or the reason why it is left out.
        Facts about the files are added to findings, which compare several splits.
        """
        for number, record in read_records(self.files, self.reading, findings):
            if self.part is None or self.part.contains(record):
                yield number, record

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
    reading, files = _find_files(data, reading)
    if "train" not in files:
        present = ", ".join(sorted(path.name for path in data.iterdir())[:8]) or "no files"
        way_out = "name one train, or give the file itself"
        raise CorpusError(f"missing file train in {data}, which has {present}; {way_out}; {_expected(task)}")
    languages = reading.source or "", reading.target or ""
    if any(languages) and not all(languages):
        raise CorpusError(f"one language of {data} is given, {source or target}; give both, source and target, or none")
    splits = {name: Split(name, paths, reading) for name, paths in files.items()}
    digests = {path.name: digest_of(path) for split in splits.values() for path in split.files}
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
        languages if all(languages) and (task == "encoder" or all(map(is_language, languages))) else None,
    )


def open_held_out(data: Path, reading: Reading) -> Split:
    """Find the records of a file, or of the part test, or else dev, of a folder, as `open_corpus`
    does. A folder without test and dev is divided as there.
    """
    found, files = _find_files(data, reading)
    if data.is_file():
        return Split("test", files["train"], found)
    name = next((name for name in ("test", "dev") if name in files), None)
    return open_corpus(data, reading).dev if name is None else Split(name, files[name], found)


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


def _find_files(data: Path, reading: Reading) -> tuple[Reading, dict[str, tuple[Path, ...]]]:
    """Return a reading with the languages, if they are known, and the files of each split; those of
    one file, or of both sides of which it is one, are train.
    """
    task, ending = reading.task, ending_of(data)
    if data.is_dir():
        return with_direction(data, sides_in(data, reading, _formats(task), task in PAIR_TASKS), reading)
    if not data.is_file():
        raise CorpusError(f"missing file or folder {data}; {_expected(task)}")
    may_be_side = task in PAIR_TASKS and ending not in (*READERS, *XML, *WAYS_OUT)
    sides = sides_of(data, reading) if may_be_side else None
    if sides is None and ending not in _formats(task):
        way_out = WAYS_OUT.get(ending, "")
        raise CorpusError(f"{data} has an unsupported format{way_out and f'; {way_out}'}; {_expected(task)}")
    return with_direction(data, {"train": sides or {"": data}}, reading)


def digest_of(path: Path) -> str:
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
        is_lm = split.reading.task == "language-model"
        raise CorpusError(
            f"{split} is empty or has only blank texts{' or dialogues without replies' * is_lm}; add examples"
        )
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
