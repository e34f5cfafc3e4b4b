"""ONNX Runtime on the CPU behind the `Runner` protocol: a session a graph, and states that steps update in place.

A state that grows is bound to the step both as input and as output: the attention kernels write the new slot into it
and copy nothing. A batch of B rows is the first B rows of each buffer, and a binding made once for a batch size and a
set of outputs is used for every step of that kind. Where all buffers together are large they have as many rows, and
rows as many slots, as have been needed so far, in powers of two: memory that nothing reaches is never taken, and what
is taken stays.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from service.bundle import Manifest, State
from service.runtime.protocol import Array, Int32, Int64, states_alike
from service.runtime.provider import Provider, load_if_there, load_session, session_options

_DTYPES: dict[str, type[Any]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


FIRST_ROWS, FIRST_SLOTS = 32, 64  # of buffers that grow, and of their axes that grow
ROOM_BYTES = 1 << 27  # for all buffers; where they fit they have their full size from the beginning


class _StateGroup:
    """States of one shape and kind in one array, so that all of them move at once."""

    def __init__(self, states: Sequence[State], sizes: Mapping[str, int]) -> None:
        self.states = states
        self._shape = states[0].shape
        self.rows = self._allocate(sizes)
        self._copied = self._make_copied()

    def _allocate(self, sizes: Mapping[str, int]) -> Array:
        rows = np.empty((len(self.states), sizes["rows"], *self._sizes(sizes)), self.states[0].dtype)
        rows.fill(0)  # now, and not page by page in the requests that first reach them
        return rows

    def _make_copied(self) -> Array | None:
        # Only the attention kernels promise to read and write the same memory; a state of fixed size is copied back.
        is_in_place = any(isinstance(axis, str) for axis in self._shape)
        return None if is_in_place or not self.is_changed else np.zeros_like(self.rows)

    def _sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one row of one state."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self._shape)

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Have so many rows, and so many slots of each axis, never fewer than before."""
        old = self.rows
        if (sizes["rows"], *self._sizes(sizes)) == old.shape[1:]:
            return
        self.rows = self._allocate(sizes)
        self.rows[tuple(slice(size) for size in old.shape)] = old
        self._copied = self._make_copied()

    @property
    def outputs(self) -> Array | None:
        """Where a step writes; None where it writes nothing."""
        return self.rows if self.is_changed and self._copied is None else self._copied

    @property
    def is_changed(self) -> bool:
        """Whether a step changes it."""
        return self.states[0].output is not None

    def copy_back(self, batch: int) -> None:
        """Take over what a step wrote elsewhere."""
        if self._copied is not None:
            self.rows[:, :batch] = self._copied[:, :batch]

    def fill(self, first: int, encoded: Mapping[str, Array], examples: Sequence[int]) -> None:
        rows = slice(first, first + len(examples))
        for index, state in enumerate(self.states):
            if state.encoder_output is not None:
                value = encoded[state.encoder_output][list(examples)]
                part: tuple[Any, ...] = (index, rows, *(slice(size) for size in value.shape[1:]))
                self.rows[part] = value
            elif "target" not in state.shape:  # what grows with the target is hidden by the row's length
                self.rows[index, rows] = 0

    def copy(self, source: int, target: int, sizes: Mapping[str, int]) -> None:
        """Copy a row over another; of the axes "target" and "source" no more than so many slots."""
        used: tuple[Any, ...] = tuple(map(slice, self._sizes(sizes)))
        self.rows[(slice(None), target, *used)] = self.rows[(slice(None), source, *used)]


def _num_bytes(state: State, sizes: Mapping[str, int]) -> int:
    """Of a state's buffer."""
    shape = (sizes[axis] if isinstance(axis, str) else axis for axis in ("rows", *state.shape))
    return math.prod(shape) * np.dtype(state.dtype).itemsize


@dataclass(frozen=True)
class _Binding:
    """What one kind of step call is bound to: `fixed` outputs have arrays of their own, each run makes the others."""

    io: Any
    fixed: Mapping[str, Array]
    made: tuple[str, ...]

    def expect_made(self) -> None:
        """Bind anew what the next run makes: maps widen from step to step, and those of the last run are let go."""
        for name in self.made:
            self.io.bind_output(name, "cpu")


class OnnxRunner:
    """Runs one bundle with ONNX Runtime. See `Runner` for what each method takes and gives."""

    provider: Provider = "cpu"

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        num_threads: int = 0,
        max_rows: int = 32,
        room_bytes: int = ROOM_BYTES,
    ) -> None:
        """Load the graphs from their files, which must have been checked (`service.bundle.check_files`).

        Args:
            folder: the bundle.
            manifest: its manifest.
            num_threads: of each graph's run; 0 leaves it to ONNX Runtime, which counts the host's cores.
            max_rows: rows of decoder state.
            room_bytes: if states of full size take no more, they have it from the beginning.
        """
        self.manifest = manifest
        self.max_rows = max_rows
        options = session_options(num_threads)
        self._encoder = load_session(folder, manifest.encoder, options, "cpu")
        # Where nothing is generated, no method but `encode` and `compare` is called.
        self._step = load_if_there(folder, manifest.step, options, "cpu")
        self._similar = load_if_there(folder, manifest.similar, options, "cpu")
        limits = manifest.limits
        self._largest = {"rows": max_rows, "source": limits.max_source_tokens, "target": limits.max_target_tokens}
        self._sizes = dict(self._largest)  # of the buffers
        if sum(_num_bytes(state, self._largest) for state in manifest.states) > room_bytes:
            first = {"rows": FIRST_ROWS, "source": FIRST_SLOTS, "target": FIRST_SLOTS}
            self._sizes = {axis: min(first[axis], largest) for axis, largest in self._largest.items()}
        self._groups = [_StateGroup(states, self._sizes) for states in states_alike(manifest.states)]
        self._token_ids = np.zeros(max_rows, np.int64)
        self._lengths = np.zeros(max_rows, np.int32)
        self._source_lengths = np.ones(max_rows, np.int32)
        self._fixed_outputs = self._allocate_fixed_outputs()
        self._bindings: dict[tuple[int, tuple[str, ...]], _Binding] = {}

    def _allocate_fixed_outputs(self) -> dict[str, Array]:
        if self._step is None:
            return {}
        states = {state.output for state in self.manifest.states}
        return {
            node.name: np.zeros((self.max_rows, *node.shape[1:]), _DTYPES[node.type])
            for node in self._step.get_outputs()
            if node.name not in states and all(isinstance(axis, int) for axis in node.shape[1:])
        }

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
        if width % 2 == 0 or width == self._largest["source"]:
            return source_ids
        return np.concatenate([source_ids, np.full((rows, 1), self.manifest.tokens.pad_id, np.int64)], axis=1)

    def compare(self, token_ids: Int64) -> Array:
        (cosines,) = self._similar.run(["cosines"], {"token_ids": token_ids})
        return np.asarray(cosines)

    def fill(self, first: int, encoded: Mapping[str, Array], examples: Sequence[int]) -> None:
        self._reserve("rows", first + len(examples))
        for state in self.manifest.states:
            if state.encoder_output is not None:
                for axis, size in zip(state.shape, encoded[state.encoder_output].shape[1:], strict=True):
                    if isinstance(axis, str):
                        self._reserve(axis, size)
        for group in self._groups:
            group.fill(first, encoded, examples)

    def _reserve(self, axis: str, size: int) -> None:
        """Have buffers of at least that size along an axis."""
        if size <= self._sizes[axis]:
            return
        self._sizes[axis] = min(1 << (size - 1).bit_length(), self._largest[axis])
        self._bindings.clear()
        for group in self._groups:
            group.resize(self._sizes)

    def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
        for group in self._groups:
            group.copy(source, target, {"target": target_tokens, "source": source_tokens})

    def branch(self, sources: Sequence[int], targets: Sequence[int], target_tokens: int) -> None:
        sizes = {**self._sizes, "target": target_tokens}
        for group in self._groups:
            if group.is_changed:
                for source, target in zip(sources, targets, strict=True):  # one by one is faster than all at once
                    group.copy(source, target, sizes)

    def step(
        self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Sequence[str]
    ) -> Mapping[str, Array]:
        batch = len(token_ids)
        self._reserve("target", int(lengths.max()) + 1)
        self._token_ids[:batch] = token_ids
        self._lengths[:batch] = lengths
        self._source_lengths[:batch] = source_lengths
        key = (batch, tuple(outputs))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind(batch, outputs)
        self._step.run_with_iobinding(binding.io)
        for group in self._groups:
            group.copy_back(batch)
        if not binding.made:
            return binding.fixed
        # As a vector: a list would wrap each of the states' outputs too, which costs more than a small step.
        values = binding.io.get_outputs_as_ortvaluevector()
        first = len(values) - len(binding.made)  # they were bound last
        made = {name: values[first + i].numpy() for i, name in enumerate(binding.made)}
        binding.expect_made()
        return {**binding.fixed, **made}

    def _bind(self, batch: int, outputs: Sequence[str]) -> _Binding:
        io = self._step.io_binding()
        rows: dict[str, Array] = {
            "token_ids": self._token_ids,
            "lengths": self._lengths,
            "source_lengths": self._source_lengths,
        }
        for name in rows.keys() & set(self.manifest.decoder.inputs):
            io.bind_ortvalue_input(name, _wrap(rows[name][:batch]))
        for group in self._groups:
            for index, state in enumerate(group.states):
                io.bind_ortvalue_input(state.input, _wrap(group.rows[index, :batch]))
                if group.outputs is not None:
                    io.bind_ortvalue_output(state.output, _wrap(group.outputs[index, :batch]))
        fixed = {name: self._fixed_outputs[name][:batch] for name in outputs if name in self._fixed_outputs}
        for name, array in fixed.items():
            io.bind_ortvalue_output(name, _wrap(array))
        binding = _Binding(io, fixed, made=tuple(name for name in outputs if name not in fixed))
        binding.expect_made()
        return binding

    def warm_up(self, max_batch_tokens: int) -> None:
        """Run each graph once at its smallest and at its largest shapes, so that no request pays for a first time.

        Args:
            max_batch_tokens: padded tokens of the largest encoder batch.
        """
        longest = self.manifest.limits.max_source_tokens
        for batch, length in ((max(1, max_batch_tokens // longest), longest), (1, 1)):
            ids, lengths = np.zeros((batch, length), np.int64), np.full(batch, length, np.int32)
            # The largest batch is rare: what it took goes back after each of these runs.
            self._encoder.run(["hidden"], {"source_ids": ids, "source_lengths": lengths}, _returning_memory())
        encoded = self.encode(ids, lengths, self.manifest.encoder.outputs)
        if self._step is None:
            return
        self.fill(0, encoded, [0])
        most = self._sizes["rows"], self._sizes["target"] - 1, self._sizes["source"]
        for batch, age, length in (most, (1, 0, 1)):
            ages, lengths = np.full(batch, age, np.int32), np.full(batch, length, np.int32)
            self.step(np.zeros(batch, np.int64), ages, lengths, tuple(self._fixed_outputs))


def _wrap(array: Array) -> Any:
    """An OrtValue over the array's own memory."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _returning_memory() -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options
