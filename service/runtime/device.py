"""The runner whose states lie in the memory of a device: CUDA's, or the CPU's used in the same way.

NumPy cannot reach that memory, so a graph of the bundle, `Manifest.rows`, moves rows there. A step takes token ids and
lengths from the host and returns the outputs that were requested; states are bound as input and as output, and stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from service.bundle import Manifest, State
from service.runtime.base import SessionRunner, StateGroup, zeros
from service.runtime.memory import PagedArray
from service.runtime.protocol import Array, Int32, Int64, states_alike
from service.runtime.provider import Provider, load_session, session_options


@dataclass(frozen=True)
class _View:
    """Part of a tensor on the device, which must outlive it."""

    address: int
    dtype: Any
    shape: Sequence[int]


class _RowMover:
    """Runs `Manifest.rows`: writes rows of one tensor over rows of another, in the memory of the device."""

    def __init__(self, session: Any, device: Provider) -> None:
        self._io = session.io_binding()
        self._session = session
        self._device = device

    def write(self, rows: _View, new: _View, sources: Sequence[int], targets: Sequence[int]) -> None:
        """rows[targets] = new[sources], with zeros where `new` is the smaller along an axis.

        No target may be named twice; `new` may be `rows` where no row is a source and a target.
        """
        missing = [0] + [size - given for size, given in zip(rows.shape[1:], new.shape[1:], strict=True)]
        self._io.bind_input("rows", self._device, 0, rows.dtype, rows.shape, rows.address)
        self._io.bind_output("rows_out", self._device, 0, rows.dtype, rows.shape, rows.address)
        self._io.bind_input("new", self._device, 0, new.dtype, new.shape, new.address)
        self._io.bind_cpu_input("sources", np.array(sources, np.int64))
        self._io.bind_cpu_input("targets", np.array(targets, np.int64)[:, None])
        self._io.bind_cpu_input("pads", np.array([0] * len(missing) + missing, np.int64))
        self._io.synchronize_inputs()
        self._session.run_with_iobinding(self._io)


class _DeviceGroup(StateGroup):
    """States in one tensor of the device.

    What no sequence has written is zero, in the positions that its lengths hide too: there a product with a weight of
    zero would turn another's NaN into its own.
    """

    def __init__(
        self, states: Sequence[State], max_rows: int, sizes: Mapping[str, int], mover: _RowMover, device: Provider
    ) -> None:
        """`sizes` are the largest of the axes that grow."""
        super().__init__(states)
        self._dtype = np.dtype(states[0].dtype)
        self._shape = self.row_shape(sizes)
        self._max_rows = max_rows
        self._mover = mover
        self._device = device
        # In the memory of the CPU, rows that no sequence has reached take none; a device allocates all of them.
        rows = PagedArray((len(states), max_rows, *self._shape), self._dtype).values
        rows = rows.reshape(len(states) * max_rows, *self._shape)
        self._tensor = onnxruntime.OrtValue.ortvalue_from_numpy(rows, device, 0)
        self._empty_row = zeros((1, *self._shape), self._dtype, device)

    def _view(self, index: int, first: int, count: int) -> _View:
        """Rows `first` to `first + count - 1` of one of the states."""
        row_size = int(np.prod(self._shape)) * self._dtype.itemsize
        offset = (index * self._max_rows + first) * row_size
        return _View(self._tensor.data_ptr() + offset, self._dtype, (count, *self._shape))

    def bind(self, io: Any, first: int, count: int) -> None:
        for index, state in enumerate(self.states):
            view = self._view(index, first, count)
            place = (self._device, 0, view.dtype, view.shape, view.address)
            io.bind_input(state.input, *place)
            if self.is_changed:
                io.bind_output(state.output, *place)

    def fill(self, first: int, encoded: Mapping[str, Any], examples: Sequence[int]) -> None:
        targets = range(first, first + len(examples))
        for index, state in enumerate(self.states):
            new, sources = self._empty_row, [0] * len(examples)
            if state.encoder_output is not None:
                new, sources = encoded[state.encoder_output], list(examples)
            given = _View(new.data_ptr(), self._dtype, new.shape())
            self._mover.write(self._view(index, 0, self._max_rows), given, sources, targets)

    def copy(self, sources: Sequence[int], targets: Sequence[int], sizes: Mapping[str, int]) -> None:
        firsts = range(0, len(self.states) * self._max_rows, self._max_rows)
        every = _View(self._tensor.data_ptr(), self._dtype, self._tensor.shape())
        self._mover.write(
            every,
            every,
            [first + row for first in firsts for row in sources],
            [first + row for first in firsts for row in targets],
        )

    def finish_step(self, rows: slice) -> None:
        """Do nothing: steps write in place."""

    def release_memory(self) -> None:
        """Do nothing: the states keep the memory of the device, which no other process should need."""


class DeviceRunner(SessionRunner):
    """Runs one bundle that `python -m export half` wrote. See `Runner` for the arguments and results of each method."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, provider: Provider, num_threads: int = 0, max_rows: int = 32
    ) -> None:
        """See `SessionRunner`. The bundle must have a graph for rows, and states that all grow."""
        super().__init__(folder, manifest, provider, num_threads, max_rows)
        assert manifest.rows is not None
        mover = _RowMover(load_session(folder, manifest.rows, session_options(num_threads), provider), provider)
        self._groups = [
            _DeviceGroup(states, max_rows, self._sizes, mover, provider) for states in states_alike(manifest.states)
        ]
        self._filling = {state.encoder_output for state in manifest.states if state.encoder_output is not None}

    def encode(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        """Encoder outputs that fill states stay on the device, for `fill` alone; the others are arrays."""
        io = self._encoder.io_binding()
        io.bind_cpu_input("source_ids", source_ids)
        io.bind_cpu_input("source_lengths", source_lengths)
        for name in outputs:
            io.bind_output(name, self.provider if name in self._filling else "cpu")
        io.synchronize_inputs()
        self._encoder.run_with_iobinding(io)
        values = zip(outputs, io.get_outputs(), strict=True)
        return {name: value if name in self._filling else value.numpy() for name, value in values}
