"""ONNX Runtime on the CPU behind the `Runner` protocol: a session a graph, and states that steps update in place.

A state that grows is bound to the step both as input and as output: the attention kernels write the new slot into it
and copy nothing. A batch of B rows is the first B rows of each buffer, and a binding made once for a batch size and a
set of outputs is used for every step of that kind. Buffers have room for `max_rows` of the longest sequences, but take
memory only for the tokens that rows hold; `release_memory` returns it when no row runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from service.bundle import Manifest, State
from service.runtime.memory import PagedArray
from service.runtime.protocol import Array, Int32, Int64, states_alike
from service.runtime.provider import Provider, load_if_there, load_session, session_options

_DTYPES: dict[str, type[Any]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


KEPT_ROWS = 4  # rows whose memory `release_memory` keeps, so that a few requests never wait for new pages


class _StateGroup:
    """States of one shape and kind in one array, so that all of them move at once."""

    def __init__(self, states: Sequence[State], max_rows: int, sizes: Mapping[str, int]) -> None:
        """`sizes` are those of the axes that grow, at most."""
        self.states = states
        self._shape = states[0].shape
        self._pages = PagedArray((len(states), max_rows, *self._sizes(sizes)), states[0].dtype)
        self.rows = self._pages.values
        # Only the attention kernels promise to read and write the same memory; a state of fixed size is copied back.
        is_in_place = any(isinstance(axis, str) for axis in self._shape)
        self._copied = None if is_in_place or not self.is_changed else np.zeros_like(self.rows)

    def _sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one row of one state."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self._shape)

    def release_memory(self) -> None:
        """Return the memory of all rows but the first few, whose states are lost, to the system."""
        self._pages.release(KEPT_ROWS)

    @property
    def outputs(self) -> Array | None:
        """Where a step writes; None where it writes nothing."""
        return self.rows if self.is_changed and self._copied is None else self._copied

    @property
    def is_changed(self) -> bool:
        """Whether a step changes it."""
        return self.states[0].output is not None

    def copy_back(self, rows: slice) -> None:
        """Take over what a step of these rows wrote elsewhere."""
        if self._copied is not None:
            self.rows[:, rows] = self._copied[:, rows]

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
    ) -> None:
        """Load the graphs from their files, which must have been checked (`service.bundle.check_files`).

        Args:
            folder: the bundle.
            manifest: its manifest.
            num_threads: of each graph's run; 0 leaves it to ONNX Runtime, which counts the host's cores.
            max_rows: rows of decoder state.
        """
        self.manifest = manifest
        self.max_rows = max_rows
        options = session_options(num_threads)
        self._encoder = load_session(folder, manifest.encoder, options, "cpu")
        # Where nothing is generated, no method but `encode` and `compare` is called.
        self._step = load_if_there(folder, manifest.step, options, "cpu")
        self._similar = load_if_there(folder, manifest.similar, options, "cpu")
        limits = manifest.limits
        self._sizes = {"source": limits.max_source_tokens, "target": limits.max_target_tokens}
        self._groups = [_StateGroup(states, max_rows, self._sizes) for states in states_alike(manifest.states)]
        self._token_ids = np.zeros(max_rows, np.int64)
        self._lengths = np.zeros(max_rows, np.int32)
        self._source_lengths = np.ones(max_rows, np.int32)
        self._fixed_outputs = self._allocate_fixed_outputs()
        self._bindings: dict[tuple[int, int, tuple[str, ...]], _Binding] = {}  # by first row, batch and outputs
        self._returning_memory = onnxruntime.RunOptions()
        self._returning_memory.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

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
        if width % 2 == 0 or width == self._sizes["source"]:
            return source_ids
        return np.concatenate([source_ids, np.full((rows, 1), self.manifest.tokens.pad_id, np.int64)], axis=1)

    @property
    def hidden_size(self) -> int:
        """M of the encoder's last layer, (B, S, M)."""
        return next(int(node.shape[-1]) for node in self._encoder.get_outputs() if node.name == "hidden")

    def compare(self, token_ids: Int64) -> Array:
        (cosines,) = self._similar.run(["cosines"], {"token_ids": token_ids})
        return np.asarray(cosines)

    def fill(self, first: int, encoded: Mapping[str, Array], examples: Sequence[int]) -> None:
        for group in self._groups:
            group.fill(first, encoded, examples)

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
        self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Sequence[str], *, first: int = 0
    ) -> Mapping[str, Array]:
        rows = slice(first, first + len(token_ids))
        self._token_ids[rows] = token_ids
        self._lengths[rows] = lengths
        self._source_lengths[rows] = source_lengths
        key = (first, len(token_ids), tuple(outputs))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind(rows, outputs)
        given = self._run_step(binding)
        # Last, so that a step that raises leaves states of fixed size as they were.
        for group in self._groups:
            group.copy_back(rows)
        return given

    def _run_step(self, binding: _Binding) -> Mapping[str, Array]:
        self._step.run_with_iobinding(binding.io)
        if not binding.made:
            return binding.fixed
        # As a vector: a list would wrap each of the states' outputs too, which costs more than a small step.
        values = binding.io.get_outputs_as_ortvaluevector()
        first = len(values) - len(binding.made)  # they were bound last
        made = {name: values[first + i].numpy() for i, name in enumerate(binding.made)}
        binding.expect_made()
        return {**binding.fixed, **made}

    def _bind(self, batch: slice, outputs: Sequence[str]) -> _Binding:
        io = self._step.io_binding()
        rows: dict[str, Array] = {
            "token_ids": self._token_ids,
            "lengths": self._lengths,
            "source_lengths": self._source_lengths,
        }
        for name in rows.keys() & set(self.manifest.decoder.inputs):
            io.bind_ortvalue_input(name, _wrap(rows[name][batch]))
        for group in self._groups:
            for index, state in enumerate(group.states):
                io.bind_ortvalue_input(state.input, _wrap(group.rows[index, batch]))
                if group.outputs is not None:
                    io.bind_ortvalue_output(state.output, _wrap(group.outputs[index, batch]))
        fixed = {name: self._fixed_outputs[name][batch] for name in outputs if name in self._fixed_outputs}
        for name, array in fixed.items():
            io.bind_ortvalue_output(name, _wrap(array))
        binding = _Binding(io, fixed, made=tuple(name for name in outputs if name not in fixed))
        binding.expect_made()
        return binding

    def release_memory(self) -> None:
        for group in self._groups:
            group.release_memory()
        # All sessions share an arena: the end of any run can return its free regions.
        source = {"source_ids": np.zeros((1, 1), np.int64), "source_lengths": np.ones(1, np.int32)}
        self._encoder.run(["hidden"], source, self._returning_memory)

    def warm_up(self, max_batch_tokens: int) -> None:
        """Run each graph once at its smallest and at its largest shapes, so that no request pays for a first time.

        Args:
            max_batch_tokens: padded tokens of the largest encoder batch.
        """
        longest = self.manifest.limits.max_source_tokens
        for batch, length in ((max(1, max_batch_tokens // longest), longest), (1, 1)):
            ids, lengths = np.zeros((batch, length), np.int64), np.full(batch, length, np.int32)
            self.encode(ids, lengths, ("hidden",))
        if self._step is not None:
            self.fill(0, self.encode(ids, lengths, self.manifest.encoder.outputs), [0])
            most = self.max_rows, self._sizes["target"] - 1, self._sizes["source"]
            for batch, age, length in (most, (1, 0, 1)):
                ages, lengths = np.full(batch, age, np.int32), np.full(batch, length, np.int32)
                self.step(np.zeros(batch, np.int64), ages, lengths, tuple(self._fixed_outputs))
        self.release_memory()  # the largest shapes are rare


def _wrap(array: Array) -> Any:
    """An OrtValue over the array's own memory."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
