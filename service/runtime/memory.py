"""Memory of the process: rows that fit, arrays that take pages as they are written, and return of unused memory.

A buffer for decoder state must be as large as the longest sequences need, and most sequences are short. An anonymous
mapping costs nothing until it is written, so a buffer can be mapped at its full size and a sequence takes memory for
the tokens that it has. The addresses never change: no growth copies a buffer, and what is bound to it stays bound.
"""

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from service.bundle import MAX_BEAMS, Manifest
from service.runtime.protocol import Array

# More rows than this share the time of a step without more tokens a second (docs/adr/0014).
MOST_ROWS = 128


def row_bytes(manifest: Manifest) -> int:
    """Return the bytes that one row of the longest sequences takes: decoder state, and scores of the next token."""
    if manifest.step is None:
        return 0
    sizes = {"source": manifest.limits.max_source_tokens, "target": manifest.limits.max_target_tokens}
    scores = 2 * manifest.limits.vocabulary * np.dtype(np.float32).itemsize  # logits and log-probabilities
    return scores + sum(
        math.prod(sizes[axis] if isinstance(axis, str) else axis for axis in state.shape)
        * np.dtype(state.dtype).itemsize
        for state in manifest.states
    )


def rows_within(num_bytes: int, sizes: Iterable[int]) -> int:
    """Return the number of rows that every model gets, so that the rows of all models fit into `num_bytes` together.

    It is at least enough for the largest beam search, also where that does not fit.

    Args:
        num_bytes: for all rows of all models.
        sizes: bytes of one row of each model.
    """
    return max(MAX_BEAMS, min(MOST_ROWS, num_bytes // max(1, sum(sizes))))


class PagedArray:
    """An array of zeros, `values`, whose pages are taken from the system when they are first written."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self._row_bytes = int(np.prod(shape[2:], dtype=np.int64)) * np.dtype(dtype).itemsize
        num_bytes = max(1, shape[0] * shape[1] * self._row_bytes)
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page is 2 MiB, and would be taken whole for one token
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.values: Array = np.frombuffer(self._mapping, dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)

    def release(self, first_row: int) -> None:
        """Give the pages of rows from `first_row` on, along the second axis, back to the system; they become zeros.

        A page that also holds a part of an earlier row is kept.
        """
        num_blocks, num_rows = self.values.shape[:2]
        for block in range(num_blocks):
            begin, end = ((block * num_rows + row) * self._row_bytes for row in (min(first_row, num_rows), num_rows))
            begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def trim_heap() -> None:
    """Return the free pages of C's heap to the system; does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
