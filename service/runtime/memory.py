"""Memory of the process: arrays that take pages only as they are written, and giving unused memory back to the system.

A buffer for decoder state must be as large as the longest sequences need, and most sequences are short. An anonymous
mapping costs nothing until it is written, so a buffer can be mapped at its full size and a sequence takes memory for
the tokens that it has. The addresses never change: no growth copies a buffer, and what is bound to it stays bound.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from service.runtime.protocol import Array


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
