"""Base classes of the runners: sessions, I/O bindings, and groups of decoder states."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from sightline.base.bundle import TOP_OUTPUTS, VOCABULARY_OUTPUTS, Manifest, State
from sightline.service.runtime.provider import (
    Provider,
    load_optional_session,
    load_session,
    run_options,
    session_options,
)
from sightline.service.runtime.runner import BLOCK_TOKENS, Array, Bools, Int32, Int64
from sightline.service.runtime.thread_counts import Activity, ThreadPlan, shortest_run, threads_alone, tune_threads

# A binding takes 30 kB, and as much time to create as a step of one row. Steps rarely need more.
MAX_BINDINGS = 128
# Warm-up with more rows and positions would allocate all the memory that rows can ever use.
WARM_UP_ROWS, WARM_UP_POSITIONS = 32, 16_384
# Size of the runs that measure the number of threads: a typical batch of a service under load.
SAMPLE_ROWS, SAMPLE_TOKENS = 16, 16
ROW_INPUTS: Mapping[str, type[Any]] = {
    "token_ids": np.int64,
    "lengths": np.int32,
    "source_lengths": np.int32,
    "whole_vocabulary": np.bool_,
    "scored": np.bool_,
}


class StateGroup(ABC):
    """States of equal shape and type in one tensor, so that their rows are copied together."""

    def __init__(self, states: Sequence[State]) -> None:
        self.states = states

    @property
    def is_changed(self) -> bool:
        """True if a step changes these states."""
        return self.states[0].is_changed

    def row_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of one row of a state for given sizes of the source and target axes."""
        return self.states[0].row_shape(sizes)

    @abstractmethod
    def bind(self, io: Any, first: int, count: int) -> None:
        """Bind `count` rows from `first` on as inputs, and as outputs if steps change them."""

    @abstractmethod
    def init_rows(self, first: int, encoded: Mapping[str, Any], examples: Sequence[int]) -> None:
        """See `Runner.init_rows`."""

    @abstractmethod
    def copy(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        positions: Sequence[slice],
        source_tokens: int | None = None,
    ) -> None:
        """Copy rows: of each pair, at least `positions` of the target axis, and `source_tokens` of
        the source axis, or all if None.
        """

    def swap(self, first: int, second: int, sizes: Mapping[str, int]) -> None:
        """Exchange two rows: at least the first `sizes` positions of the dynamic axes."""
        raise NotImplementedError("rows are swapped only in decoder-only bundles, which have no float16 form")

    def store_prefix(self, row: int, positions: slice, block: int) -> None:
        """Copy the states of a row at these target positions to a block."""
        raise NotImplementedError("only the runner for the CPU has blocks of prefixes")

    def load_prefix(self, block: int, row: int, positions: slice) -> None:
        """Copy a block to the states of a row at these target positions."""
        raise NotImplementedError("only the runner for the CPU has blocks of prefixes")

    def is_finite(self, row: int, positions: slice) -> bool:
        """Return False if the states of a row have NaN or infinity at these target positions.

        States in device memory are not checked.
        """
        return True

    def finish_step(self, rows: slice) -> None:  # noqa: B027 - most steps write in place
        """Copy back the states of these rows that a step has written to a separate array."""

    def release_memory(self) -> None:  # noqa: B027 - the memory of a device stays allocated
        """See `Runner.release_memory`."""


class StepBinding:
    """The decoder graph bound to a range of rows and a set of outputs, for repeated runs."""

    def __init__(
        self,
        session: Any,
        first: int,
        count: int,
        outputs: Sequence[str],
        groups: Sequence[StateGroup],
        fixed: Mapping[str, Array],
        device: Provider,
        num_tokens: int | None,
    ) -> None:
        """Bind the graph.

        Args:
            fixed: preallocated arrays by output; each run allocates the other outputs. If the last
                axis of an output is dynamic, it is that of the longest source, here of any.
            device: provider whose memory holds the inputs.
            num_tokens: number of tokens of each row; None for a graph that reads one token of each
                row, without an axis for it.
        """
        self._session = session
        self._io = session.io_binding()
        inputs = {node.name for node in session.get_inputs()}
        shapes = {"token_ids": (count,) if num_tokens is None else (count, num_tokens)}
        self._inputs = {
            name: np.zeros(shapes.get(name, (count,)), dtype) for name, dtype in ROW_INPUTS.items() if name in inputs
        }
        self._copies: dict[str, Any] = {}  # of inputs, in the memory of a device
        for name, array in self._inputs.items():
            tensor = onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)  # on the CPU, it is the array
            if device != "cpu":
                self._copies[name] = tensor
            self._io.bind_ortvalue_input(name, tensor)
        for group in groups:
            group.bind(self._io, first, count)
        self._fixed = dict(fixed)
        sized = {node.name for node in session.get_outputs() if isinstance(node.shape[-1], int)}
        self._of_source = {name: array for name, array in fixed.items() if name not in sized}
        self._columns = 0
        for name, array in fixed.items():
            self._io.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        self._allocated = [name for name in outputs if name not in fixed]
        self._expect_allocated()

    def run(self, inputs: Mapping[str, Array], options: Any = None) -> Mapping[str, Array]:
        """Run the graph; `options` are run options of ONNX Runtime."""
        for name, array in self._inputs.items():
            array[...] = inputs[name]
        for name, tensor in self._copies.items():
            tensor.update_inplace(self._inputs[name])
        if self._of_source:
            self._set_columns(max(inputs["source_lengths"].tolist()))  # faster than NumPy for few rows
        self._session.run_with_iobinding(self._io, options)
        if not self._allocated:
            return self._fixed
        # A list would wrap all the states too, which costs more time than a small step.
        values = self._io.get_outputs_as_ortvaluevector()
        first = len(values) - len(self._allocated)  # these outputs were bound last
        allocated = {name: values[first + i].numpy() for i, name in enumerate(self._allocated)}
        self._expect_allocated()
        return {**self._fixed, **allocated}

    def _set_columns(self, columns: int) -> None:
        """Bind the start of the arrays of the source, which has this length."""
        if columns != self._columns:
            self._columns = columns
            for name, array in self._of_source.items():
                part = array.reshape(-1)[: array[..., :columns].size].reshape(*array.shape[:-1], columns)
                self._fixed[name] = part
                self._io.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(part))

    def _expect_allocated(self) -> None:
        """Bind these outputs again, because the size of attention maps grows with each step."""
        for name in self._allocated:
            self._io.bind_output(name, "cpu")


class SessionRunner(ABC):
    """Runs one bundle with ONNX Runtime. `Runner` describes the methods."""

    def __init__(self, folder: Path, manifest: Manifest, provider: Provider, num_threads: int, max_rows: int) -> None:
        """Load the graphs, whose files `sightline.base.bundle_files.check_files` must have checked.

        A run on the CPU uses `num_threads`; with 0, ONNX Runtime uses all cores of the host.
        """
        self.manifest = manifest
        self.max_rows = max_rows
        self.num_prefix_blocks = 0
        self.provider = provider
        options = session_options(num_threads)
        # Without an encoder graph, `run_encoder` may not be called. Without a decoder graph, only
        # `run_encoder` may be called.
        self._encoder = load_optional_session(folder, manifest.encoder, options, provider)
        self._decoder = load_optional_session(folder, manifest.decoder, options, provider)
        # A packed copy of the embeddings would need as much memory as their file. Kernels for
        # quantized weights need the packed form.
        self._packs_table = manifest.dtype != "float32"
        table_options = session_options(num_threads, prepack=self._packs_table)
        self._predict = load_optional_session(folder, manifest.predict, table_options, provider)
        self._contributions = load_optional_session(folder, manifest.contributions, table_options, provider)
        graphs = {"encoder": manifest.encoder, "decoder": manifest.decoder}
        self.threads = {name: num_threads for name, graph in graphs.items() if graph is not None}
        self.threads_alone = 1  # number of threads while the other workers are idle, if it is more
        self._alone: dict[str, Any] = {}  # sessions by graph with more threads, for use while other workers are idle
        self._activity = Activity()
        self._sizes = {"source": manifest.limits.max_source_tokens, "target": manifest.limits.max_target_tokens}
        self._groups: Sequence[StateGroup] = ()
        self._bindings: dict[tuple[int, int, tuple[str, ...], bool], StepBinding] = {}  # most recently used last
        # The decoder graph of a decoder-only model has an axis for several tokens of a row.
        self._tokens_per_step = 1 if manifest.is_decoder_only else None
        self._map_names = {name for maps in manifest.attention for name in maps.outputs}
        self._options = run_options()

    def choose_threads(self, folder: Path, plan: ThreadPlan) -> None:
        """Set the number of threads of encoder and decoder; results do not change."""
        manifest = self.manifest
        self._activity = plan.activity
        self._bindings.clear()  # they keep their session

        def load_encoder(threads: int) -> None:
            self._encoder = None  # two sessions would need twice the memory
            self._encoder = load_session(folder, manifest.encoder_graph, session_options(threads), self.provider)

        def load_decoder(threads: int) -> None:
            self._decoder = None
            self._decoder = load_session(folder, manifest.decoder_graph, session_options(threads), self.provider)

        num_bytes, known = manifest.loaded_bytes, plan.known.get(manifest.name, {})
        alone = threads_alone(num_bytes, plan.cores)
        for name, graph, load, seconds_of_run in (
            ("encoder", manifest.encoder, load_encoder, self._seconds_of_encoder),
            ("decoder", manifest.decoder, load_decoder, self._seconds_of_decoder),
        ):
            if graph is None:
                continue
            number = known.get(name)
            if number is None:
                number = tune_threads(f"{manifest.name}, {name}", load, seconds_of_run, plan.most(num_bytes))
            elif number != self.threads[name]:
                load(number)
            self.threads[name] = number
            if alone > number:
                self._alone[name] = load_session(folder, graph, session_options(alone), self.provider)
                self.threads_alone = alone

    def _seconds_of_encoder(self) -> float:
        length = min(SAMPLE_TOKENS, self._sizes["source"])
        ids, lengths = np.zeros((SAMPLE_ROWS, length), np.int64), np.full(SAMPLE_ROWS, length, np.int32)
        return shortest_run(lambda: self._encoder.run(["hidden"], {"source_ids": ids, "source_lengths": lengths}))

    def _seconds_of_decoder(self) -> float:
        rows = min(SAMPLE_ROWS, self.max_rows)
        inputs: dict[str, Array] = {
            "token_ids": np.zeros(rows, np.int64),
            "lengths": np.full(rows, min(SAMPLE_TOKENS, self._sizes["target"]) - 1, np.int32),
            "source_lengths": np.full(rows, min(SAMPLE_TOKENS, self._sizes["source"]), np.int32),
            "whole_vocabulary": np.zeros(rows, np.bool_),
            "scored": np.ones(rows, np.bool_),
        }
        if self._tokens_per_step:
            inputs["token_ids"] = inputs["token_ids"][:, None]
        outputs = ("top_ids", "top_logprobs")
        binding = StepBinding(self._decoder, 0, rows, outputs, self._groups, {}, self.provider, self._tokens_per_step)
        return shortest_run(lambda: binding.run(inputs))

    def _session(self, graph: str) -> Any:
        """Return the session of the encoder or the decoder for the next run."""
        if graph in self._alone and self._activity.is_alone():
            return self._alone[graph]
        return self._encoder if graph == "encoder" else self._decoder

    @abstractmethod
    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]: ...

    @property
    def hidden_size(self) -> int:
        """Size M of the last layer over the source, (B, S, M)."""
        session = self._decoder if self._encoder is None else self._encoder
        return next(int(node.shape[-1]) for node in session.get_outputs() if node.name == "hidden")

    def predict(self, hidden: Array) -> Array:
        # Without packing, a single row has another kernel, which rounds differently.
        is_doubled = len(hidden) == 1 and not self._packs_table
        batch = np.repeat(hidden, 2, axis=0) if is_doubled else hidden
        (logits,) = self._predict.run(["logits"], {"hidden": batch}, self._options)
        return np.asarray(logits)[: len(hidden)]

    def measure_contributions(self, method: str, source_ids: Int64, target_ids: Int64) -> Mapping[str, Array]:
        graph = self.manifest.contributions
        assert graph is not None, "the bundle has a graph of contributions"
        names = [name for name in graph.outputs if name.startswith(f"{method}.")]
        # Zeroing values needs a pass through each layer for each token.
        zeroed = max(source_ids.size, target_ids.size) if method == "value_zeroing" else 1
        inputs = {"source_ids": source_ids, "target_ids": target_ids, "zeroed_tokens": np.array([zeroed], np.int64)}
        outputs = self._contributions.run(names, inputs, self._options)
        return {name.partition(".")[2]: output for name, output in zip(names, outputs, strict=True)}

    def init_rows(
        self,
        first: int,
        encoded: Mapping[str, Array],
        examples: Sequence[int],
        visible: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        initial = self._visible_states(encoded, visible) if visible else encoded
        for group in self._groups:
            group.init_rows(first, initial, examples)

    def _visible_states(self, encoded: Mapping[str, Any], visible: Mapping[int, Sequence[int]]) -> dict[str, Any]:
        """Return encoder outputs whose states have only the visible source tokens, in front."""
        kept = dict(encoded)
        for state in self.manifest.states:
            if state.encoder_output is not None and "source" in state.shape:
                values = self._to_host(encoded[state.encoder_output]).copy()
                for example, indices in visible.items():
                    by_token = np.moveaxis(values[example], state.shape.index("source"), 0)
                    by_token[: len(indices)] = by_token[list(indices)]
                    by_token[len(indices) :] = 0
                kept[state.encoder_output] = self._from_host(values)
        return kept

    def _to_host(self, value: Any) -> Array:
        """Return an initial value of a state that `run_encoder` returned as an array."""
        array: Array = value
        return array

    def _from_host(self, array: Array) -> Any:
        """Return an array in the form that `run_encoder` returns an initial value of a state."""
        return array

    def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
        for group in self._groups:
            group.copy([source], [target], [slice(target_tokens)], source_tokens)

    def fork(self, sources: Sequence[int], targets: Sequence[int], positions: Sequence[slice]) -> None:
        for group in self._groups:
            if group.is_changed:
                group.copy(sources, targets, positions)

    def step(
        self,
        token_ids: Int64,
        lengths: Int32,
        source_lengths: Int32,
        outputs: Sequence[str],
        *,
        first: int = 0,
        whole: Bools | None = None,
    ) -> Mapping[str, Array]:
        if whole is None:
            whole = np.full(len(token_ids), not VOCABULARY_OUTPUTS.isdisjoint(outputs))
        binding = self._binding(first, len(token_ids), tuple(outputs))
        if self._tokens_per_step:
            token_ids = token_ids[:, None]
        inputs: dict[str, Array] = {"token_ids": token_ids, "lengths": lengths, "source_lengths": source_lengths}
        inputs |= {"whole_vocabulary": whole, "scored": np.ones(len(lengths), np.bool_)}
        arrays = binding.run(inputs, self._options)
        # After the run, so that a step that raises leaves states of fixed size unchanged.
        for group in self._groups:
            group.finish_step(slice(first, first + len(token_ids)))
        if self._tokens_per_step and not self._map_names.isdisjoint(outputs):
            # (B, H, L, 1, columns) to (B, H, L, columns)
            arrays = {name: array[:, :, :, 0] if name in self._map_names else array for name, array in arrays.items()}
        return arrays

    def prefill(self, row: int, token_ids: Int64, length: int, outputs: Sequence[str] = ()) -> Mapping[str, Array]:
        return self._prefill(row, token_ids, length, outputs, self._options)

    def _prefill(
        self, row: int, token_ids: Int64, length: int, outputs: Sequence[str], options: Any
    ) -> Mapping[str, Array]:
        # A new binding takes little time compared with several tokens, and sizes and rows vary.
        binding = StepBinding(
            self._session("decoder"), row, 1, outputs, self._groups, {}, self.provider, len(token_ids)
        )
        scored = np.array([not (TOP_OUTPUTS | VOCABULARY_OUTPUTS).isdisjoint(outputs)])
        inputs: dict[str, Array] = {"token_ids": token_ids[None], "lengths": np.array([length], np.int32)}
        inputs["scored"] = scored
        arrays = binding.run(inputs, options)
        for group in self._groups:
            group.finish_step(slice(row, row + 1))
        if not all(group.is_finite(row, slice(length, length + len(token_ids))) for group in self._groups):
            raise FloatingPointError("a state of the decoder is not finite")
        return {name: array[0] for name, array in arrays.items()}

    def store_prefix(self, row: int, first_token: int, block: int) -> None:
        for group in self._groups:
            group.store_prefix(row, slice(first_token, first_token + BLOCK_TOKENS), block)

    def load_prefix(self, block: int, row: int, first_token: int) -> None:
        for group in self._groups:
            group.load_prefix(block, row, slice(first_token, first_token + BLOCK_TOKENS))

    def swap(self, first: int, second: int, target_tokens: int) -> None:
        for group in self._groups:
            group.swap(first, second, {**self._sizes, "target": target_tokens})

    def _binding(self, first: int, count: int, outputs: tuple[str, ...]) -> StepBinding:
        """Return the binding for a kind of step from an LRU cache."""
        session = self._session("decoder")
        key = (first, count, outputs, session is self._decoder)
        binding = self._bindings.pop(key, None)
        if binding is None:
            fixed = self._fixed_outputs(outputs, count)
            binding = StepBinding(
                session, first, count, outputs, self._groups, fixed, self.provider, self._tokens_per_step
            )
            if len(self._bindings) == MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
        self._bindings[key] = binding
        return binding

    def _fixed_outputs(self, outputs: Sequence[str], count: int) -> Mapping[str, Array]:
        """Return preallocated arrays for `count` rows, for those outputs that have them."""
        return {}

    def release_memory(self) -> None:
        for group in self._groups:
            group.release_memory()

    def terminate(self) -> None:
        self._options.terminate = True

    def warm_up(self, max_batch_tokens: int) -> None:
        """Run each graph with its smallest shapes and with large shapes."""
        longest, encoded = self.manifest.limits.max_source_tokens, dict[str, Array]()
        if self._encoder is not None:
            for batch, length in ((max(1, max_batch_tokens // longest), longest), (1, 1)):
                ids, lengths = np.zeros((batch, length), np.int64), np.full(batch, length, np.int32)
                self.run_encoder(ids, lengths, ("hidden",))
            encoded |= self.run_encoder(ids, lengths, self.manifest.encoder_graph.outputs)
        if self._decoder is not None:
            self.init_rows(0, encoded, [0])
            positions = self._sizes["target"]
            rows = min(self.max_rows, WARM_UP_ROWS, max(1, WARM_UP_POSITIONS // positions))
            largest = rows, positions - 1, longest
            for batch, age, length in (largest, (1, 0, 1)):
                ages, lengths = np.full(batch, age, np.int32), np.full(batch, length, np.int32)
                self.step(np.zeros(batch, np.int64), ages, lengths, ("top_ids", "top_logprobs"))
        self.release_memory()  # large shapes are rare
