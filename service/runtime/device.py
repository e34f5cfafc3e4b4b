"""Runner with decoder states in device memory: CUDA, or the CPU as a device for tests.

NumPy cannot access that memory, so the graph `Manifest.rows` of the bundle copies rows. A step
reads token ids and lengths from the host and returns the requested outputs. The states are bound as
inputs and outputs and stay on the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from sightline.base.bundle import Manifest, State
from sightline.service.runtime.base import SessionRunner, StateGroup
from sightline.service.runtime.provider import Provider, load_session, session_options
from sightline.service.runtime.runner import Array, Int32, Int64, group_states
from sightline.service.runtime.state_memory import PagedArray


@dataclass(frozen=True)
class _View:
    """A part of a device tensor. The tensor must outlive the view."""

    address: int
    dtype: Any
    shape: Sequence[int]


class _RowCopier:
    """Copies rows between tensors in device memory with the graph `Manifest.rows`."""

    def __init__(self, session: Any, device: Provider) -> None:
        self._io = session.io_binding()
        self._session = session
        self._device = device

    def write(self, rows: _View, new: _View, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Assign rows[targets] = new[sources], padded with zeros if `new` is smaller along an axis.

        Targets must be unique. `new` may be the same tensor as `rows` if no row is both a source
        and a target.
        """
        missing = [0] + [size - new_size for size, new_size in zip(rows.shape[1:], new.shape[1:], strict=True)]
        self._io.bind_input("rows", self._device, 0, rows.dtype, rows.shape, rows.address)
        self._io.bind_output("rows_out", self._device, 0, rows.dtype, rows.shape, rows.address)
        self._io.bind_input("new", self._device, 0, new.dtype, new.shape, new.address)
        self._io.bind_cpu_input("sources", np.array(sources, np.int64))
        self._io.bind_cpu_input("targets", np.array(targets, np.int64)[:, None])
        self._io.bind_cpu_input("pads", np.array([0] * len(missing) + missing, np.int64))
        self._io.synchronize_inputs()
        self._session.run_with_iobinding(self._io)


class _DeviceGroup(StateGroup):
    """States in one device tensor.

    Positions that no sequence has written are always zero, even if they are masked: a NaN of an
    earlier sequence multiplied by an attention weight of zero would still be NaN.
    """

    def __init__(
        self, states: Sequence[State], max_rows: int, sizes: Mapping[str, int], copier: _RowCopier, device: Provider
    ) -> None:
        """Allocate the tensor; `sizes` are the maximum sizes of the source and target axes."""
        super().__init__(states)
        self._dtype = np.dtype(states[0].dtype)
        self._shape = self.row_shape(sizes)
        self._max_rows = max_rows
        self._copier = copier
        self._device = device
        # On the CPU, pages are allocated when rows are first written; a device allocates all now.
        rows = PagedArray((len(states), max_rows, *self._shape), self._dtype).values
        rows = rows.reshape(len(states) * max_rows, *self._shape)
        self._tensor = onnxruntime.OrtValue.ortvalue_from_numpy(rows, device, 0)
        empty_row = np.zeros((1, *self._shape), self._dtype)
        self._empty_row = onnxruntime.OrtValue.ortvalue_from_numpy(empty_row, device, 0)

    def _view(self, index: int, first: int, count: int) -> _View:
        """Return rows `first` to `first + count - 1` of one state."""
        row_size = int(np.prod(self._shape)) * self._dtype.itemsize
        offset = (index * self._max_rows + first) * row_size
        return _View(self._tensor.data_ptr() + offset, self._dtype, (count, *self._shape))

    def bind(self, io: Any, first: int, count: int) -> None:
        for index, state in enumerate(self.states):
            view = self._view(index, first, count)
            location = (self._device, 0, view.dtype, view.shape, view.address)
            io.bind_input(state.input, *location)
            if self.is_changed:
                io.bind_output(state.output, *location)

    def init_rows(self, first: int, encoded: Mapping[str, Any], examples: Sequence[int]) -> None:
        targets = range(first, first + len(examples))
        for index, state in enumerate(self.states):
            new, sources = self._empty_row, [0] * len(examples)
            if state.encoder_output is not None:
                new, sources = encoded[state.encoder_output], list(examples)
            new_view = _View(new.data_ptr(), self._dtype, new.shape())
            self._copier.write(self._view(index, 0, self._max_rows), new_view, sources, targets)

    def copy(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        positions: Sequence[slice],
        source_tokens: int | None = None,
    ) -> None:
        firsts = range(0, len(self.states) * self._max_rows, self._max_rows)
        every = _View(self._tensor.data_ptr(), self._dtype, self._tensor.shape())
        self._copier.write(
            every,
            every,
            [first + row for first in firsts for row in sources],
            [first + row for first in firsts for row in targets],
        )


class DeviceRunner(SessionRunner):
    """Runs a bundle of `sightline quantize --bits 16`. `Runner` describes the methods."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, provider: Provider, num_threads: int = 0, max_rows: int = 32
    ) -> None:
        """See `SessionRunner`. The bundle needs the graph `rows`, and only dynamic states."""
        super().__init__(folder, manifest, provider, num_threads, max_rows)
        assert manifest.rows is not None
        copier = _RowCopier(load_session(folder, manifest.rows, session_options(num_threads), provider), provider)
        self._groups = [
            _DeviceGroup(states, max_rows, self._sizes, copier, provider) for states in group_states(manifest.states)
        ]
        self._initial_values = {state.encoder_output for state in manifest.states if state.encoder_output is not None}

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        """See `Runner.run_encoder`. Initial values of states stay on the device."""
        io = self._encoder.io_binding()
        io.bind_cpu_input("source_ids", source_ids)
        io.bind_cpu_input("source_lengths", source_lengths)
        for name in outputs:
            io.bind_output(name, self.provider if name in self._initial_values else "cpu")
        io.synchronize_inputs()
        self._encoder.run_with_iobinding(io, self._options)
        values = zip(outputs, io.get_outputs(), strict=True)
        return {name: value if name in self._initial_values else value.numpy() for name, value in values}

    def _to_host(self, value: Any) -> Array:
        array: Array = value.numpy()
        return array

    def _from_host(self, array: Array) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self.provider, 0)
