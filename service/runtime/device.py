"""The `Runner` protocol where states live in the memory of a device: CUDA's, or the CPU's own as any other.

What moves rows there is a graph of the bundle, `Manifest.rows`: NumPy cannot reach them. Of a step, token ids and
lengths go in and what is asked for comes out; the states are bound as input and as output, and stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from service.bundle import Graph, Manifest, State
from service.runtime.memory import PagedArray
from service.runtime.protocol import Array, Int32, Int64, states_alike
from service.runtime.provider import Provider, load_if_there, load_session, session_options

_ROW_INPUTS: Mapping[str, type[Any]] = {"token_ids": np.int64, "lengths": np.int32, "source_lengths": np.int32}


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


class _StateGroup:
    """States of one shape and kind in one tensor, so that all of them move at once.

    What no sequence has written is zero, in the slots that its lengths hide too: there a product with a weight of zero
    would turn another's NaN into its own.
    """

    def __init__(self, states: Sequence[State], max_rows: int, sizes: Mapping[str, int], device: Provider) -> None:
        first = states[0]
        self.states = states
        self.is_changed = first.output is not None
        self._dtype = np.dtype(first.dtype)
        self._shape = [sizes[axis] if isinstance(axis, str) else axis for axis in first.shape]
        self._max_rows = max_rows
        # In the memory of the CPU, rows that no sequence has reached take none; a device allocates all of them.
        rows = PagedArray((len(states), max_rows, *self._shape), self._dtype).values
        rows = rows.reshape(len(states) * max_rows, *self._shape)
        self._tensor = onnxruntime.OrtValue.ortvalue_from_numpy(rows, device, 0)
        self._empty_row = _zeros((1, *self._shape), self._dtype, device)

    def view(self, index: int, batch: int, first: int = 0) -> _View:
        """Rows `first` to `first + batch - 1` of one of the states."""
        row_size = int(np.prod(self._shape)) * self._dtype.itemsize
        offset = (index * self._max_rows + first) * row_size
        return _View(self._tensor.data_ptr() + offset, self._dtype, (batch, *self._shape))

    def fill(self, mover: _RowMover, first: int, encoded: Mapping[str, Any], examples: Sequence[int]) -> None:
        targets = range(first, first + len(examples))
        for index, state in enumerate(self.states):
            new, sources = self._empty_row, [0] * len(examples)
            if state.encoder_output is not None:
                new, sources = encoded[state.encoder_output], list(examples)
            given = _View(new.data_ptr(), self._dtype, new.shape())
            mover.write(self.view(index, self._max_rows), given, sources, targets)

    def copy(self, mover: _RowMover, sources: Sequence[int], targets: Sequence[int]) -> None:
        firsts = range(0, len(self.states) * self._max_rows, self._max_rows)
        every = _View(self._tensor.data_ptr(), self._dtype, self._tensor.shape())
        mover.write(
            every,
            every,
            [first + row for first in firsts for row in sources],
            [first + row for first in firsts for row in targets],
        )


def _zeros(shape: Sequence[int], dtype: Any, device: Provider) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), device, 0)


class _Binding:
    """A step of some rows with one set of outputs: its inputs are tensors of their own on the device."""

    def __init__(
        self,
        session: Any,
        first: int,
        batch: int,
        outputs: Sequence[str],
        groups: Sequence[_StateGroup],
        device: Provider,
    ) -> None:
        self._session = session
        self._outputs = outputs
        self._io = session.io_binding()
        known = {node.name for node in session.get_inputs()}
        self._inputs = {name: _zeros((batch,), dtype, device) for name, dtype in _ROW_INPUTS.items() if name in known}
        for name, tensor in self._inputs.items():
            self._io.bind_ortvalue_input(name, tensor)
        for group in groups:
            for index, state in enumerate(group.states):
                view = group.view(index, batch, first)
                place = (device, 0, view.dtype, view.shape, view.address)
                self._io.bind_input(state.input, *place)
                if state.output is not None:
                    self._io.bind_output(state.output, *place)
        self._expect_outputs()

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        for name, tensor in self._inputs.items():
            tensor.update_inplace(np.ascontiguousarray(given[name]))
        self._session.run_with_iobinding(self._io)
        # As a vector: a list would wrap each of the states too.
        made = self._io.get_outputs_as_ortvaluevector()
        first = len(made) - len(self._outputs)  # they were bound last
        values = {name: made[first + place].numpy() for place, name in enumerate(self._outputs)}
        self._expect_outputs()
        return values

    def _expect_outputs(self) -> None:
        """Bind anew what the next run makes: maps widen from step to step, and those of the last run are let go."""
        for name in self._outputs:
            self._io.bind_output(name, "cpu")


class DeviceRunner:
    """Runs one bundle that `python -m export half` wrote. See `Runner` for what each method takes and gives."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, provider: Provider, num_threads: int = 0, max_rows: int = 32
    ) -> None:
        """Load the graphs from their files, which must have been checked (`service.bundle.check_files`).

        Args:
            folder: the bundle, with a graph for rows and states that all grow.
            manifest: its manifest.
            provider: what runs the graphs, and in whose memory the states are.
            num_threads: of what runs on the CPU; 0 leaves it to ONNX Runtime.
            max_rows: rows of decoder state.
        """
        self.manifest = manifest
        self.max_rows = max_rows
        self.provider = provider

        def load(graph: Graph) -> Any:
            return load_session(folder, graph, session_options(num_threads), provider)

        assert manifest.rows is not None
        self._encoder = load(manifest.encoder)
        self._step = load(manifest.decoder)
        self._similar = load_if_there(folder, manifest.similar, session_options(num_threads), provider)
        self._mover = _RowMover(load(manifest.rows), provider)
        self._groups = self._allocate()
        self._filling = {state.encoder_output for state in manifest.states if state.encoder_output is not None}
        self._bindings: dict[tuple[int, int, tuple[str, ...]], _Binding] = {}  # by first row, batch and outputs

    def _allocate(self) -> list[_StateGroup]:
        limits = self.manifest.limits
        sizes = {"source": limits.max_source_tokens, "target": limits.max_target_tokens}
        alike = states_alike(self.manifest.states)
        return [_StateGroup(states, self.max_rows, sizes, self.provider) for states in alike]

    def encode(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        """What fills states stays on the device, for `fill` alone; all else comes as arrays."""
        io = self._encoder.io_binding()
        io.bind_cpu_input("source_ids", source_ids)
        io.bind_cpu_input("source_lengths", source_lengths)
        for name in outputs:
            io.bind_output(name, self.provider if name in self._filling else "cpu")
        io.synchronize_inputs()
        self._encoder.run_with_iobinding(io)
        values = zip(outputs, io.get_outputs(), strict=True)
        return {name: value if name in self._filling else value.numpy() for name, value in values}

    @property
    def hidden_size(self) -> int:
        """M of the encoder's last layer, (B, S, M)."""
        return next(int(node.shape[-1]) for node in self._encoder.get_outputs() if node.name == "hidden")

    def compare(self, token_ids: Int64) -> Array:
        (cosines,) = self._similar.run(["cosines"], {"token_ids": token_ids})
        return np.asarray(cosines)

    def fill(self, first: int, encoded: Mapping[str, Array], examples: Sequence[int]) -> None:
        for group in self._groups:
            group.fill(self._mover, first, encoded, examples)

    def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
        for group in self._groups:
            group.copy(self._mover, [source], [target])

    def branch(self, sources: Sequence[int], targets: Sequence[int], target_tokens: int) -> None:
        for group in self._groups:
            if group.is_changed:
                group.copy(self._mover, sources, targets)

    def step(
        self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Sequence[str], *, first: int = 0
    ) -> Mapping[str, Array]:
        key = (first, len(token_ids), tuple(outputs))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = _Binding(self._step, *key, self._groups, self.provider)
        return binding.run({"token_ids": token_ids, "lengths": lengths, "source_lengths": source_lengths})

    def release_memory(self) -> None:
        """Do nothing: the states keep the memory of the device, which no other process should need."""

    def warm_up(self, max_batch_tokens: int) -> None:
        """Run each graph once at its smallest and at its largest shapes, so that no request pays for a first time.

        Args:
            max_batch_tokens: padded tokens of the largest encoder batch.
        """
        longest = self.manifest.limits.max_source_tokens
        scores = ("top_logprobs", "top_ids")
        for batch, length in ((max(1, max_batch_tokens // longest), longest), (1, 1)):
            ids, lengths = np.zeros((batch, length), np.int64), np.full(batch, length, np.int32)
            encoded = self.encode(ids, lengths, self.manifest.encoder.outputs)
        self.fill(0, encoded, [0])
        self.move(0, 0, 0, 0)
        for batch in (self.max_rows, 1):
            self.step(np.zeros(batch, np.int64), np.zeros(batch, np.int32), np.ones(batch, np.int32), scores)
