"""Runner for the CPU with decoder states in NumPy arrays that steps update in place.

A state with a dynamic axis is bound both as input and as output of the decoder graph: the attention
kernels write the new position into it and do not copy it. A batch of B rows consists of B
consecutive rows of each buffer. The I/O binding for a range of rows and a set of outputs is created
once and reused. All buffers are mapped for `max_rows` rows of the maximum length, but use memory
only for the rows and tokens in use. `release_memory` returns the memory when no row is running.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from sightline.base.bundle import BundleError, Manifest, State
from sightline.service.runtime.base import SessionRunner, StateGroup
from sightline.service.runtime.provider import run_options
from sightline.service.runtime.runner import BLOCK_TOKENS, Array, Int32, Int64, group_states
from sightline.service.runtime.state_memory import PagedArray, prefix_block_bytes, row_bytes

# Name of an axis that has the length of the longest source; that of recurrent models is padded.
LONGEST_SOURCE = "longest_cross_attention"
_DTYPES: dict[str, type[Any]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


class _ArrayGroup(StateGroup):
    """States in one NumPy array of shape (states, max_rows, ...)."""

    def __init__(self, states: Sequence[State], max_rows: int, sizes: Mapping[str, int], num_blocks: int) -> None:
        """Map the arrays; `sizes` are the maximum sizes of the source and target axes."""
        super().__init__(states)
        shape = (len(states), max_rows, *self.row_shape(sizes))
        read = written = PagedArray(shape, states[0].dtype)
        # Only attention kernels support the same memory as input and output. States of fixed size
        # are written to a second array and copied back.
        if self.is_changed and states[0].has_fixed_size:
            written = PagedArray(shape, states[0].dtype)
        self._pages = (read, written)
        self._rows, self._outputs = read.values, written.values
        block_shape = self.row_shape({**sizes, "target": BLOCK_TOKENS})
        self._blocks = PagedArray((len(states), num_blocks, *block_shape), states[0].dtype).values

    def bind(self, io: Any, first: int, count: int) -> None:
        rows = slice(first, first + count)
        for index, state in enumerate(self.states):
            io.bind_ortvalue_input(state.input, _wrap(self._rows[index, rows]))
            if state.output is not None:
                io.bind_ortvalue_output(state.output, _wrap(self._outputs[index, rows]))

    def init_rows(self, first: int, encoded: Mapping[str, Array], examples: Sequence[int]) -> None:
        rows = slice(first, first + len(examples))
        for index, state in enumerate(self.states):
            if state.encoder_output is not None:
                value = encoded[state.encoder_output][list(examples)]
                part: tuple[Any, ...] = (index, rows, *(slice(size) for size in value.shape[1:]))
                self._rows[part] = value
            elif "target" not in state.shape:  # positions of the target axis are masked by the row's length
                self._rows[index, rows] = 0

    def copy(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        positions: Sequence[slice],
        source_tokens: int | None = None,
    ) -> None:
        shape, rows, every = self.states[0].shape, self._rows, slice(None)
        for source, target, part in zip(sources, targets, positions, strict=True):  # faster than lists of indices
            used = [part if axis == "target" else slice(source_tokens if axis == "source" else None) for axis in shape]
            rows[(every, target, *used)] = rows[(every, source, *used)]

    def swap(self, first: int, second: int, sizes: Mapping[str, int]) -> None:
        used: tuple[Any, ...] = tuple(map(slice, self.row_shape(sizes)))
        for rows in self._rows:  # a state at a time, so that the copy is small
            kept = rows[(first, *used)].copy()
            rows[(first, *used)] = rows[(second, *used)]
            rows[(second, *used)] = kept

    def store_prefix(self, row: int, positions: slice, block: int) -> None:
        self._blocks[:, block] = self._rows[self._part(row, positions)]

    def load_prefix(self, block: int, row: int, positions: slice) -> None:
        self._rows[self._part(row, positions)] = self._blocks[:, block]

    def is_finite(self, row: int, positions: slice) -> bool:
        return bool(np.isfinite(self._rows[self._part(row, positions)]).all())

    def _part(self, row: int, positions: slice) -> tuple[Any, ...]:
        """Return the index of all states of a row at some target positions."""
        axes = (positions if axis == "target" else slice(None) for axis in self.states[0].shape)
        return (slice(None), row, *axes)

    def finish_step(self, rows: slice) -> None:
        if self._outputs is not self._rows:
            self._rows[:, rows] = self._outputs[:, rows]

    def release_memory(self) -> None:
        """Return the memory of all rows to the system, but not that of the blocks."""
        for pages in self._pages:
            pages.release()


class OnnxRunner(SessionRunner):
    """Runs one bundle on the CPU. `Runner` describes the methods."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        num_threads: int = 0,
        max_rows: int = 32,
        prefix_cache_bytes: int = 0,
    ) -> None:
        """Load the graphs, map the states and, up to `prefix_cache_bytes`, blocks of prefixes."""
        super().__init__(folder, manifest, "cpu", num_threads, max_rows)
        if manifest.has_prefix_states:
            self.num_prefix_blocks = prefix_cache_bytes // prefix_block_bytes(manifest)
        try:
            self._groups = [
                _ArrayGroup(states, max_rows, self._sizes, self.num_prefix_blocks)
                for states in group_states(manifest.states)
            ]
            self._outputs = self._allocate_outputs()
        except OSError as error:
            raise BundleError(
                f"{folder}: {max_rows} rows of decoder state need {max_rows * row_bytes(manifest)} bytes "
                f"({manifest.limits.max_target_tokens} tokens per row), which the system does not provide: "
                f"{error.strerror}; set max_rows to a smaller number, or allow more memory"
            ) from None
        self._shrink_arena = run_options()
        self._shrink_arena.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def _allocate_outputs(self) -> dict[str, PagedArray]:
        """Allocate arrays for decoder outputs with a static row shape, and for maps of the source.

        States have arrays of their own.
        """
        if self._decoder is None:
            return {}
        states, cross = {state.output for state in self.manifest.states}, self.manifest.cross_attention
        outputs = dict[str, PagedArray]()
        for node in self._decoder.get_outputs():
            shape = node.shape[1:]
            if cross is not None and node.name in cross.outputs and shape[-1] == LONGEST_SOURCE:
                shape[-1] = self._sizes["source"]
            if node.name not in states and all(isinstance(axis, int) for axis in shape):
                outputs[node.name] = PagedArray((1, self.max_rows, *shape), _DTYPES[node.type])
        return outputs

    def _fixed_outputs(self, outputs: Sequence[str], count: int) -> Mapping[str, Array]:
        return {name: self._outputs[name].values[0, :count] for name in outputs if name in self._outputs}

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        feed = {"source_ids": self._with_even_width(source_ids), "source_lengths": source_lengths}
        return dict(zip(outputs, self._session("encoder").run(list(outputs), feed, self._options), strict=True))

    def _with_even_width(self, source_ids: Int64) -> Int64:
        """Pad an odd number of columns to an even number, unless it is the model's maximum.

        Attention processes queries in blocks of an even size. A single remaining query is processed
        by another kernel, which rounds differently. An even width avoids this case, so that the
        results of a sequence are bit-identical in every batch. At the maximum width, only sequences
        of that length have a last column, so no padding is needed.
        """
        rows, width = source_ids.shape
        if width % 2 == 0 or width == self._sizes["source"]:
            return source_ids
        return np.concatenate([source_ids, np.full((rows, 1), self.manifest.tokens.pad_id, np.int64)], axis=1)

    def release_memory(self) -> None:
        super().release_memory()
        for array in self._outputs.values():
            array.release()
        # All sessions share one arena, so the end of any run can release its free memory.
        if self._encoder is None:
            self._prefill(0, np.zeros(1, np.int64), 0, (), self._shrink_arena)
        else:
            source = {"source_ids": np.zeros((1, 1), np.int64), "source_lengths": np.ones(1, np.int32)}
            self._encoder.run(["hidden"], source, self._shrink_arena)


def _wrap(array: Array) -> Any:
    """Return an OrtValue that shares the memory of an array."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
