"""The runner on the CPU: states are NumPy arrays that steps update in place.

A state that grows is bound to the step both as input and as output: the attention kernels write the new position into
it and copy nothing. A batch of B rows is the first B rows of each buffer, and a binding made once for a batch size and
a set of outputs is used for every step of that kind. All buffers have room for `max_rows` of the longest sequences, but
take memory only for the rows and tokens in use; `release_memory` returns it when no row runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from service.bundle import Manifest, State
from service.runtime.base import SessionRunner, StateGroup
from service.runtime.memory import PagedArray
from service.runtime.protocol import Array, Int32, Int64, states_alike

_DTYPES: dict[str, type[Any]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}

KEPT_ROWS = 4  # rows whose memory `release_memory` keeps, so that a few requests never wait for new pages


class _ArrayGroup(StateGroup):
    """States in one NumPy array, (states, max_rows, ...)."""

    def __init__(self, states: Sequence[State], max_rows: int, sizes: Mapping[str, int]) -> None:
        """`sizes` are the largest of the axes that grow."""
        super().__init__(states)
        shape = (len(states), max_rows, *self.row_shape(sizes))
        read = written = PagedArray(shape, states[0].dtype)
        # Only the attention kernels promise to read and write the same memory; a state of fixed size is copied back.
        if self.is_changed and all(isinstance(axis, int) for axis in states[0].shape):
            written = PagedArray(shape, states[0].dtype)
        self._pages = (read, written)
        self._rows, self._outputs = read.values, written.values

    def bind(self, io: Any, first: int, count: int) -> None:
        rows = slice(first, first + count)
        for index, state in enumerate(self.states):
            io.bind_ortvalue_input(state.input, _wrap(self._rows[index, rows]))
            if self.is_changed:
                io.bind_ortvalue_output(state.output, _wrap(self._outputs[index, rows]))

    def fill(self, first: int, encoded: Mapping[str, Array], examples: Sequence[int]) -> None:
        rows = slice(first, first + len(examples))
        for index, state in enumerate(self.states):
            if state.encoder_output is not None:
                value = encoded[state.encoder_output][list(examples)]
                part: tuple[Any, ...] = (index, rows, *(slice(size) for size in value.shape[1:]))
                self._rows[part] = value
            elif "target" not in state.shape:  # what grows with the target is hidden by the row's length
                self._rows[index, rows] = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], sizes: Mapping[str, int]) -> None:
        used: tuple[Any, ...] = tuple(map(slice, self.row_shape(sizes)))
        for source, target in zip(sources, targets, strict=True):  # one by one is faster than all at once
            self._rows[(slice(None), target, *used)] = self._rows[(slice(None), source, *used)]

    def finish_step(self, rows: slice) -> None:
        if self._outputs is not self._rows:
            self._rows[:, rows] = self._outputs[:, rows]

    def release_memory(self) -> None:
        """Return the memory of all rows but the first few, whose states are lost, to the system."""
        for pages in self._pages:
            pages.release(KEPT_ROWS)


class OnnxRunner(SessionRunner):
    """Runs one bundle on the CPU. See `Runner` for the arguments and results of each method."""

    def __init__(self, folder: Path, manifest: Manifest, *, num_threads: int = 0, max_rows: int = 32) -> None:
        """See `SessionRunner`."""
        super().__init__(folder, manifest, "cpu", num_threads, max_rows)
        self._groups = [_ArrayGroup(states, max_rows, self._sizes) for states in states_alike(manifest.states)]
        self._outputs = self._allocate_outputs()
        self._returning_memory = onnxruntime.RunOptions()
        self._returning_memory.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def _allocate_outputs(self) -> dict[str, PagedArray]:
        """Allocate arrays for the outputs of a step whose size is known, except states."""
        if self._decoder is None:
            return {}
        states = {state.output for state in self.manifest.states}
        return {
            node.name: PagedArray((1, self.max_rows, *node.shape[1:]), _DTYPES[node.type])
            for node in self._decoder.get_outputs()
            if node.name not in states and all(isinstance(axis, int) for axis in node.shape[1:])
        }

    def _fixed_outputs(self, outputs: Sequence[str], count: int) -> Mapping[str, Array]:
        return {name: self._outputs[name].values[0, :count] for name in outputs if name in self._outputs}

    def encode(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        feed = {"source_ids": self._with_even_width(source_ids), "source_lengths": source_lengths}
        return dict(zip(outputs, self._encoder.run(list(outputs), feed), strict=True))

    def _with_even_width(self, source_ids: Int64) -> Int64:
        """Add a column of padding to an odd number of columns, if the model has a position for it.

        Attention takes queries in blocks of an even size, and a lone last query goes through another kernel, which
        rounds otherwise. An even width never leaves one alone, so that the same sequence gets the same bits whatever
        the longest of its batch is. At the model's limit only a sequence of that length has the last column.
        """
        rows, width = source_ids.shape
        if width % 2 == 0 or width == self._sizes["source"]:
            return source_ids
        return np.concatenate([source_ids, np.full((rows, 1), self.manifest.tokens.pad_id, np.int64)], axis=1)

    def release_memory(self) -> None:
        super().release_memory()
        for array in self._outputs.values():
            array.release(KEPT_ROWS)
        self._bindings.clear()
        # All sessions share an arena: the end of any run can return its free regions.
        source = {"source_ids": np.zeros((1, 1), np.int64), "source_lengths": np.ones(1, np.int32)}
        self._encoder.run(["hidden"], source, self._returning_memory)


def _wrap(array: Array) -> Any:
    """An OrtValue over the array's own memory."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
