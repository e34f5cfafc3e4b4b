"""Memory of the process: number of rows that fit, lazily allocated arrays, and release of memory.

A buffer for decoder state must have space for the longest sequences, but most sequences are short.
An anonymous mapping allocates pages only when they are written. Therefore buffers are mapped at
full size, and a sequence uses memory only for the tokens that it has. The addresses never change:
buffers are not copied when sequences grow, and I/O bindings remain valid.
"""

import ctypes
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.base.bundle import MAX_BEAMS, Manifest
from sightline.service.runtime.runner import BLOCK_TOKENS, Array

if TYPE_CHECKING:  # that module needs ONNX Runtime
    from sightline.service.runtime.provider import Provider

# More rows do not increase the number of tokens per second, but each step takes longer
# (docs/adr/0014).
MAX_AUTO_ROWS: Mapping["Provider", int] = {"cpu": 32, "cuda": 128}
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # looked up once: a CDLL is a reference cycle


@dataclass(frozen=True)
class ModelMemory:
    """Memory of a loaded model in bytes.

    Decoder state uses memory only for the tokens that a sequence has. The numbers about state are
    those of sequences with the maximum length. The prefix cache grows with the prompts in it.
    """

    weights: int  # graphs and weights on disk
    state_per_row: int  # decoder state of one row, and its scores of the next token
    max_state: int  # all rows
    state_in_use: int  # rows that requests have now
    max_prefix_cache: int  # all blocks of the prefix cache
    prefix_cache_in_use: int  # blocks that hold states


def row_bytes(manifest: Manifest) -> int:
    """Return the maximum memory of one row in bytes: decoder state and scores of the next token."""
    if manifest.decoder is None:
        return 0
    sizes = {"source": manifest.limits.max_source_tokens, "target": manifest.limits.max_target_tokens}
    scores = 2 * manifest.limits.vocabulary * np.dtype(np.float32).itemsize  # logits and log-probabilities
    return scores + _state_bytes(manifest, sizes)


def prefix_block_bytes(manifest: Manifest) -> int:
    """Return the bytes of a block of the prefix cache; 0 if there is none."""
    if not manifest.has_prefix_states:
        return 0
    return _state_bytes(manifest, {"target": BLOCK_TOKENS})


def _state_bytes(manifest: Manifest, sizes: Mapping[str, int]) -> int:
    """Return the size of all states of one row for given sizes of the source and target axes."""
    return sum(math.prod(state.row_shape(sizes)) * np.dtype(state.dtype).itemsize for state in manifest.states)


def rows_within(num_bytes: int, sizes: Iterable[int], provider: "Provider") -> int:
    """Return the number of rows of each model with which all models fit into `num_bytes`.

    `sizes` are the bytes of one row of each model. The result is at least `MAX_BEAMS`, even if
    these rows do not fit; see `fitted_rows`.
    """
    return max(MAX_BEAMS, min(MAX_AUTO_ROWS[provider], num_bytes // max(1, sum(sizes))))


def fitted_rows(most: int, num_bytes: int, manifest: Manifest) -> int:
    """Return the number of rows of a model: at most `most`, and at least one, as many as fit into
    `num_bytes` if no other model has a row.
    """
    return max(1, min(most, num_bytes // max(1, row_bytes(manifest))))


class PagedArray:
    """An array of zeros whose memory pages are allocated when they are first written."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        size = math.prod(shape)
        self._mapping = mmap.mmap(
            -1, max(1, size * np.dtype(dtype).itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one token would allocate a huge page of 2 MiB
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.values: Array = np.frombuffer(self._mapping, dtype, size).reshape(shape)

    def release(self) -> None:
        """Return the memory to the system; all values become zeros."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return free pages of the C heap to the system; does nothing if the C library is not glibc."""
    if _TRIM is not None:
        _TRIM(0)
