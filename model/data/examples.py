"""Encoded examples, in memory or in files that are read on demand."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray
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
    """Examples in the files of an `ExampleWriter`, which are mapped into memory."""

    def __init__(self, folder: Path, name: str) -> None:
        """Open the files. Raises `OSError` if one is missing, `ValueError` if it is damaged."""
        try:
            first, second, self._offsets = (
                np.asarray(np.load(folder / f"{name}.{part}.npy", mmap_mode="r")) for part in (*_SIDES, "offsets")
            )
        except EOFError as error:
            raise ValueError(f"a file {name}.*.npy in {folder} is empty") from error
        self._lists = (first, second)  # offsets are (N + 1, 2)
        if [len(values) for values in self._lists] != self._offsets[-1].tolist():
            raise ValueError(f"the files {name}.*.npy in {folder} do not belong together")
        self.lengths = np.diff(self._offsets, axis=0).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be between 0 and {len(self) - 1}, got {index}")
        (start, second_start), (end, second_end) = self._offsets[index : index + 2].tolist()
        return self._lists[0][start:end].tolist(), self._lists[1][second_start:second_end].tolist()


_SIDES = ("first", "second")


class ExampleWriter:
    """Writes examples to files of a folder: both lists without gaps, and offsets of examples."""

    def __init__(self, folder: Path, name: str, largest: tuple[int, int]) -> None:
        """Create files in an existing folder. `name` begins their names, and the `largest` values
        of both lists determine the sizes of integers.
        """
        self._lists = [
            _ArrayWriter(folder / f"{name}.{side}.npy", np.min_scalar_type(value))
            for side, value in zip(_SIDES, largest, strict=True)
        ]
        self._offsets = _ArrayWriter(folder / f"{name}.offsets.npy", np.int64, (2,))
        self._end = np.zeros((1, 2), np.int64)
        self._offsets.add(self._end)
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for array in (*self._lists, self._offsets):
            array.close()

    def add(self, examples: Sequence[Example]) -> None:
        """Append examples. Raises `OverflowError` for a value that is negative or too large."""
        if not examples:
            return
        lengths = lengths_of(examples)
        for side, array in enumerate(self._lists):
            array.add(flatten(examples, side))
        offsets = self._end + np.cumsum(lengths, axis=0, dtype=np.int64)
        self._offsets.add(offsets)
        self._end = offsets[-1:]
        rows = chain.from_iterable((*size, *ids, *other) for size, (ids, other) in zip(lengths, examples, strict=True))
        self._digest.update(np.fromiter(rows, "<i8").tobytes())

    def digest(self) -> str:
        """Return the SHA-256 of the examples so far; it does not depend on the calls of `add`."""
        return self._digest.hexdigest()


class _ArrayWriter:
    """Writes an array of NumPy whose first axis grows."""

    def __init__(self, path: Path, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> None:
        self._dtype, self._shape, self._length = np.dtype(dtype), shape, 0
        self._file = path.open("wb")
        self._write_header()
        self._start = self._file.tell()

    def _write_header(self) -> None:
        # NumPy leaves space in the header, so that the first axis can grow.
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._length, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)

    def add(self, values: NDArray[np.int64]) -> None:
        limits = np.iinfo(self._dtype)
        if values.size and not limits.min <= values.min() <= values.max() <= limits.max:
            raise OverflowError(f"values must be between {limits.min} and {limits.max}")
        self._file.write(values.astype(self._dtype).tobytes())
        self._length += len(values)

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                self._file.seek(0)
                self._write_header()
                assert self._file.tell() == self._start


def flatten(examples: Sequence[Example], side: int) -> NDArray[np.int64]:
    """Return one of both lists of all examples, one after another."""
    return np.fromiter(chain.from_iterable(example[side] for example in examples), np.int64)


def lengths_of(examples: Sequence[Example]) -> NDArray[np.int32]:
    """Return the lengths (N, 2) of both lists of examples."""
    return np.array([[len(first), len(second)] for first, second in examples], np.int32).reshape(-1, 2)
