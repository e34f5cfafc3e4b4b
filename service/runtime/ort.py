"""ONNX Runtime behind the `Runner` protocol: two sessions, and one buffer for each state that steps update in place.

A state that grows keeps `max_rows` rows of its largest size, bound to the step both as input and as output: the
attention kernels write the new slot into it and copy nothing. A batch of B rows is the first B rows of each buffer, and
a binding made once for a batch size and a set of outputs is used for every step of that kind.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime

from service.bundle import Graph, Manifest, State
from service.runtime.protocol import Array, Int32, Int64

Provider = Literal["cpu", "cuda"]

_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
_DTYPES: dict[str, type[Any]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


class RuntimeUnavailableError(Exception):
    """The provider that was asked for is not in the installed ONNX Runtime."""


def choose_provider(wanted: Literal["auto", "cpu", "cuda"]) -> Provider:
    """CUDA where it is asked for, or offered and left to us.

    Raises:
        RuntimeUnavailableError: "cuda" is asked for and the installed package does not offer it.
    """
    offers_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if wanted == "cuda" and not offers_cuda:
        raise RuntimeUnavailableError("the installed onnxruntime has no CUDA provider; install the extra 'gpu'")
    return "cuda" if wanted != "cpu" and offers_cuda else "cpu"


@dataclass(frozen=True)
class _StateBuffer:
    """All rows of one state. `output` is the same memory where the step updates in place."""

    state: State
    rows: Array  # (max_rows, *shape)
    output: Array | None

    @property
    def is_copied_back(self) -> bool:
        return self.output is not None and self.output is not self.rows


@dataclass(frozen=True)
class _Binding:
    """What one kind of step call is bound to: `fixed` outputs have arrays of their own, each run makes the others."""

    io: Any
    fixed: Mapping[str, Array]
    made: tuple[str, ...]


class OnnxRunner:
    """Runs one bundle with ONNX Runtime. See `Runner` for what each method takes and gives."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, provider: Provider = "cpu", num_threads: int = 0, max_rows: int = 32
    ) -> None:
        """Load both graphs from their files, which must have been checked (`service.bundle.check_files`).

        Args:
            folder: the bundle.
            manifest: its manifest.
            provider: what runs the graphs.
            num_threads: of each graph's run; 0 leaves it to ONNX Runtime, which counts the host's cores.
            max_rows: rows of decoder state.
        """
        self.manifest = manifest
        self.max_rows = max_rows
        options = _session_options(num_threads)
        self._encoder = _load(folder, manifest.encoder, options, provider)
        self._step = _load(folder, manifest.step, options, provider)
        self._states = [self._allocate(state) for state in manifest.states]
        self._token_ids = np.zeros(max_rows, np.int64)
        self._lengths = np.zeros(max_rows, np.int32)
        self._source_lengths = np.ones(max_rows, np.int32)
        self._fixed_outputs = self._allocate_fixed_outputs()
        self._bindings: dict[tuple[int, tuple[str, ...]], _Binding] = {}

    def _allocate(self, state: State) -> _StateBuffer:
        limits = self.manifest.limits
        sizes = {"source": limits.max_source_tokens, "target": limits.max_target_tokens}
        shape = (self.max_rows, *(sizes[axis] if isinstance(axis, str) else axis for axis in state.shape))
        rows = np.zeros(shape, state.dtype)
        grows = any(isinstance(axis, str) for axis in state.shape)
        # Only the attention kernels promise to read and write the same memory; a state of fixed size is copied back.
        output = None if state.output is None else rows if grows else np.zeros(shape, state.dtype)
        return _StateBuffer(state, rows, output)

    def _allocate_fixed_outputs(self) -> dict[str, Array]:
        states = {state.output for state in self.manifest.states}
        return {
            node.name: np.zeros((self.max_rows, *node.shape[1:]), _DTYPES[node.type])
            for node in self._step.get_outputs()
            if node.name not in states and all(isinstance(axis, int) for axis in node.shape[1:])
        }

    def encode(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        feed = {"source_ids": source_ids, "source_lengths": source_lengths}
        return dict(zip(outputs, self._encoder.run(list(outputs), feed), strict=True))

    def fill(self, row: int, encoded: Mapping[str, Array], index: int) -> None:
        for buffer in self._states:
            name = buffer.state.encoder_output
            if name is not None:
                value = encoded[name][index]
                index_of_part: tuple[Any, ...] = (row, *(slice(size) for size in value.shape))
                buffer.rows[index_of_part] = value
            elif "target" not in buffer.state.shape:  # what grows with the target is hidden by the row's length
                buffer.rows[row] = 0

    def move(self, source: int, target: int) -> None:
        for buffer in self._states:
            buffer.rows[target] = buffer.rows[source]

    def step(
        self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Sequence[str]
    ) -> Mapping[str, Array]:
        batch = len(token_ids)
        self._token_ids[:batch] = token_ids
        self._lengths[:batch] = lengths
        self._source_lengths[:batch] = source_lengths
        key = (batch, tuple(outputs))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind(batch, outputs)
        for name in binding.made:  # anew for each run: maps widen from step to step
            binding.io.bind_output(name, "cpu")
        self._step.run_with_iobinding(binding.io)
        for buffer in self._states:
            if buffer.is_copied_back:
                assert buffer.output is not None
                buffer.rows[:batch] = buffer.output[:batch]
        if not binding.made:
            return binding.fixed
        # As a vector: a list would wrap each of the states' outputs too, which costs more than a small step.
        values = binding.io.get_outputs_as_ortvaluevector()
        first = len(values) - len(binding.made)  # they were bound last
        return {**binding.fixed, **{name: values[first + i].numpy() for i, name in enumerate(binding.made)}}

    def _bind(self, batch: int, outputs: Sequence[str]) -> _Binding:
        io = self._step.io_binding()
        rows: dict[str, Array] = {
            "token_ids": self._token_ids,
            "lengths": self._lengths,
            "source_lengths": self._source_lengths,
        }
        for name in rows.keys() & set(self.manifest.step.inputs):
            io.bind_ortvalue_input(name, _wrap(rows[name][:batch]))
        for buffer in self._states:
            io.bind_ortvalue_input(buffer.state.input, _wrap(buffer.rows[:batch]))
            if buffer.output is not None:
                io.bind_ortvalue_output(buffer.state.output, _wrap(buffer.output[:batch]))
        fixed = {name: self._fixed_outputs[name][:batch] for name in outputs if name in self._fixed_outputs}
        for name, array in fixed.items():
            io.bind_ortvalue_output(name, _wrap(array))
        return _Binding(io, fixed, made=tuple(name for name in outputs if name not in fixed))

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
        # The states' first pages come from the kernel when they are first written, 30 ms for all of them.
        self.fill(0, self.encode(ids, lengths, self.manifest.encoder.outputs), 0)
        last_slot = self.manifest.limits.max_target_tokens - 1
        for batch, age, length in ((self.max_rows, last_slot, longest), (1, 0, 1)):
            ages, lengths = np.full(batch, age, np.int32), np.full(batch, length, np.int32)
            self.step(np.zeros(batch, np.int64), ages, lengths, tuple(self._fixed_outputs))


def _wrap(array: Array) -> Any:
    """An OrtValue over the array's own memory."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _session_options(num_threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    # Shapes change with every step and batch: remembered patterns and their memory would only grow.
    options.enable_mem_pattern = False
    # Threads that spin after a run would take the core on which Python serves HTTP.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3  # errors; warnings about the graph are the export's concern
    return options


def _returning_memory() -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _load(folder: Path, graph: Graph, options: Any, provider: Provider) -> Any:
    return onnxruntime.InferenceSession(os.fspath(folder / graph.file), options, providers=_PROVIDERS[provider])
