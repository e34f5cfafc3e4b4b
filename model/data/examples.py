"""Encoded examples, in memory or in files that are read on demand."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sightline.model.data.records import Record

# Two lists of integers, whose meaning depends on the task. Translation and encoder: token ids of
# both sides, see `sightline.model.data.similar_texts` for those of an encoder. Classification:
# token ids, and indices of labels. Tagging: token ids, and the index of the tag of each from 1 on,
# or 0. Reranking: token ids of a pair, and its score. Language model: token ids, and 1 for each
# token that is part of the loss, otherwise 0.
Example: TypeAlias = tuple[Sequence[int], Sequence[int]]


class Examples(Protocol):
    lengths: NDArray[np.int32]  # (N, 2), the lengths of both lists

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True)
class TrainingData:
    """Tokenizer and encoded examples of a run."""

    tokenizer: Tokenizer
    train: Examples
    dev: Examples
    digest: str  # of the examples, with which a run can be resumed
    dev_records: Sequence[Record] = ()  # for metrics; if there are none, only the loss is computed


class MemoryExamples:
    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples
        self.lengths = lengths_of(examples)

    def digest(self) -> str:
        """Return a SHA-256 of the examples."""
        return hashlib.sha256(repr([*map(tuple, self._examples)]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class DiskExamples:
    """Examples in the files of an `ExampleWriter`, of which the integers are mapped into memory."""

    def __init__(self, folder: Path, name: str) -> None:
        """Open the files. Raises `OSError` if one is missing, `ValueError` if they do not fit."""
        self.lengths = np.fromfile(folder / f"{name}.lengths", "<i4").reshape(-1, 2)
        self._starts = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths.sum(axis=1), out=self._starts[1:])
        path, size = folder / f"{name}.values", int(self._starts[-1])
        if path.stat().st_size != 4 * size:
            raise ValueError(f"the files {name}.* in {folder} do not belong together")
        # An empty file cannot be mapped.
        self._values = np.memmap(path, "<i4", "r") if size else np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be between 0 and {len(self) - 1}, got {index}")
        start, end = self._starts[index : index + 2].tolist()
        values, length = self._values[start:end].tolist(), self.lengths[index, 0]
        return values[:length], values[length:]


class ExampleWriter:
    """Writes examples to two files of a folder, as integers of four bytes: `NAME.values` has both
    lists of each example, `NAME.lengths` their lengths.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._lengths = (folder / f"{name}.lengths").open("wb")
        self._values = (folder / f"{name}.values").open("wb")
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lengths.close()
        self._values.close()

    def add(self, examples: Sequence[Example]) -> None:
        """Append examples. Raises `OverflowError` for a value of more than four bytes."""
        self._lengths.write(lengths_of(examples).tobytes())
        values = chain.from_iterable((*first, *second) for first, second in examples)
        self._values.write(np.fromiter(values, "<i4").tobytes())
        rows = chain.from_iterable((len(first), len(second), *first, *second) for first, second in examples)
        self._digest.update(np.fromiter(rows, "<i8").tobytes())

    def digest(self) -> str:
        """Return the SHA-256 of the examples so far; it does not depend on the calls of `add`."""
        return self._digest.hexdigest()


def lengths_of(examples: Sequence[Example]) -> NDArray[np.int32]:
    """Return the lengths (N, 2) of both lists of examples."""
    return np.array([[len(first), len(second)] for first, second in examples], np.int32).reshape(-1, 2)
