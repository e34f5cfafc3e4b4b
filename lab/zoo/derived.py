"""Corpora that are derived from a folder of data, as `sightline train` reads them.

A labelled corpus has the lines `label index, tab, text` of SST-2 as records. The others are derived
from parallel text by a seeded rule: a small corpus has some pairs of train, and all of the other
splits; in a joined corpus, each pair consists of several pairs of the same split, so that sources
have 20 to 60 words. Files with the ending `.lc.norm.tok.LANGUAGE`, which have the same lines in
another form, are derived likewise.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Literal

from sightline.model.data.text import read_lines

Derived = Literal["small", "joined", "labelled"]
SEED = 1
LABELS = ("negative", "positive")  # of SST-2, by their indices
SOURCE = "en"  # language whose words are counted
SMALL_PAIRS = 10_000
SHORTEST, LONGEST = 20, 60  # words of a joined source
JOINED_PAIRS = 5_000  # of train

Groups = list[list[int]]  # numbers of the lines that form each pair


def derive(kind: Derived, data: Path, folder: Path) -> None:
    """Write a derived corpus to a folder that appears when all of its files are complete; do
    nothing if it exists. Raises `ValueError` if a line has no label, or the files of a split have
    different numbers of lines.
    """
    if folder.exists():
        return
    # Another process may derive the same corpus at the same time, and renames its own copy first.
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        if kind == "labelled":
            _write_labelled(data, partial)
        else:
            _write_parallel(_RULES[kind], data, partial)
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_labelled(data: Path, folder: Path) -> None:
    paths = sorted(data.glob("*.tsv"))
    if not paths:
        raise FileNotFoundError(f"missing file train.tsv in {data}")
    for path in paths:
        records = list[str]()
        for number, line in enumerate(read_lines(path), start=1):
            label, _, text = line.partition("\t")
            if label not in map(str, range(len(LABELS))) or not text.strip():
                raise ValueError(f"{path}, line {number}: expected `label index, tab, text`")
            records.append(json.dumps({"text": text, "label": LABELS[int(label)]}) + "\n")
        (folder / f"{path.stem}.jsonl").write_text("".join(records), encoding="utf-8")


def _write_parallel(rule: "_Rule", data: Path, folder: Path) -> None:
    splits = [path.stem for path in sorted(data.glob(f"*.{SOURCE}")) if "." not in path.stem]
    if not splits:
        raise FileNotFoundError(f"missing file train.{SOURCE} in {data}")
    for split in splits:
        groups = rule(split, read_lines(data / f"{split}.{SOURCE}"))
        for path in sorted(data.glob(f"{split}.*")):
            lines = read_lines(path)
            if groups and max(map(max, groups)) >= len(lines):
                raise ValueError(f"{path} has {len(lines)} lines, fewer than {split}.{SOURCE}; it needs as many")
            texts = [" ".join(lines[number] for number in group) + "\n" for group in groups]
            (folder / path.name).write_text("".join(texts), encoding="utf-8")


def small(split: str, sources: Sequence[str]) -> Groups:
    """Return the lines of a small corpus: a random part of train in its order, all other lines."""
    numbers = list(range(len(sources)))
    if split == "train":
        numbers = sorted(Random(SEED).sample(numbers, min(SMALL_PAIRS, len(numbers))))
    return [[number] for number in numbers]


def joined(split: str, sources: Sequence[str]) -> Groups:
    """Return lines that are joined until their words reach a random length from 20 to 60. Each line
    is in at most one group. A group that would be longer than 60 words is dropped.
    """
    rng = Random(f"{SEED} {split}")
    order = list(range(len(sources)))
    rng.shuffle(order)
    groups: Groups = []
    group, words, wanted = list[int](), 0, rng.randint(SHORTEST, LONGEST)
    for number in order:
        group.append(number)
        words += len(sources[number].split())
        if words >= wanted:
            if words <= LONGEST:
                groups.append(group)
            group, words, wanted = [], 0, rng.randint(SHORTEST, LONGEST)
    return groups[:JOINED_PAIRS] if split == "train" else groups


_Rule = Callable[[str, Sequence[str]], Groups]
_RULES: dict[Derived, _Rule] = {"small": small, "joined": joined}
