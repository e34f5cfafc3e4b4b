"""Slow execution of a bundle's graphs for verification. States are updated in place, as served."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from sightline.base.bundle import PREFILL_TOKENS, VOCABULARY_OUTPUTS, Graph, Manifest, State
from sightline.export.limits import folder_bytes

SMALL_BYTES = 10_000_000  # of a bundle whose operations are shorter than the time that threads wait for each other
Array = NDArray[Any]
States = dict[str, Array]  # by input name of the decoder graph, (B, ...)


def open_session(graph: Path, threads: int = 0) -> Any:
    """Load a graph as the service does; ONNX Runtime finds the weights beside it.

    An operation has one thread on each core by default, or one where the bundle is small.
    """
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False  # shapes change with every call
    options.intra_op_num_threads = threads or int(folder_bytes(graph.parent) < SMALL_BYTES)
    # Errors only: for keys of dynamic length, ONNX Runtime infers a width of 0 for the weights of
    # `Attention` and warns at every call that the width differs.
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        str(graph), options, ["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )


class DecoderSession:
    """A decoder graph in ONNX Runtime."""

    def __init__(self, graph: Path, states: Sequence[State], threads: int = 0) -> None:
        self.session = open_session(graph, threads)
        self._states = tuple(states)

    def run(
        self,
        states: States,
        token_ids: Array,
        lengths: Sequence[int],
        outputs: Sequence[str],
        source_lengths: Sequence[int] = (),
    ) -> dict[str, Array]:
        """Run the graph and update the states of B rows in place.

        Args:
            token_ids: (B,), or (B, S) for a decoder-only model, where B or S is 1.
            lengths: (B,) number of tokens of each row that the states contain.
            outputs: a shortlist is not used if they have scores of the whole vocabulary.
            source_lengths: (B,), not read by decoders without cross-attention.
        """
        inputs = {
            "token_ids": np.ascontiguousarray(token_ids, np.int64),
            "lengths": np.array(lengths, np.int32),
            "source_lengths": np.array(source_lengths, np.int32),
            "scored": np.ones(len(lengths), np.bool_),
            "whole_vocabulary": np.full(len(lengths), not VOCABULARY_OUTPUTS.isdisjoint(outputs)),
        }
        binding = self.session.io_binding()
        for name in inputs.keys() & {graph_input.name for graph_input in self.session.get_inputs()}:
            binding.bind_cpu_input(name, inputs[name])
        separate: dict[str, Array] = {}  # outputs of states that are not updated in place, by input
        for state in self._states:
            memory = onnxruntime.OrtValue.ortvalue_from_numpy(states[state.input])
            binding.bind_ortvalue_input(state.input, memory)
            if state.output is not None:
                if state.has_fixed_size:
                    separate[state.input] = np.empty_like(states[state.input])
                    memory = onnxruntime.OrtValue.ortvalue_from_numpy(separate[state.input])
                binding.bind_ortvalue_output(state.output, memory)
        for name in outputs:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        for name, array in separate.items():
            states[name][...] = array
        values = binding.get_outputs()[-len(outputs) :]  # bound last
        return {name: value.numpy() for name, value in zip(outputs, values, strict=True)}


@dataclass(frozen=True)
class Sessions:
    """Bundle loaded into ONNX Runtime on the CPU."""

    manifest: Manifest
    encoder: Any  # None if the model is decoder-only
    decoder: Any  # a DecoderSession, None if the model does not generate text


def open_sessions(folder: Path, manifest: Manifest) -> Sessions:
    """Load the graphs of a bundle for small calls, in which a second thread would mostly wait."""

    def load(graph: Graph | None) -> Any:
        return None if graph is None else open_session(folder / graph.file, threads=1)

    decoder = manifest.decoder and DecoderSession(folder / manifest.decoder.file, manifest.states, threads=1)
    return Sessions(manifest, load(manifest.encoder), decoder)


def default_language_ids(manifest: Manifest) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before a source, those after it, and the forced first ones of a target."""
    languages = manifest.languages
    if languages is None:
        return (), (), ()
    source, target = languages.source, languages.target
    before = *languages.source_prefix_of_target.get(target, ()), *languages.source_prefix.get(source, ())
    return before, languages.source_suffix.get(source, ()), languages.target_prefix.get(target, ())


def encode(sessions: Sessions, sources: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Run the encoder graph on sources, padded on the right, and return all its outputs."""
    names = sessions.manifest.encoder_graph.outputs
    values = sessions.encoder.run(list(names), padded_sources(sources, sessions.manifest.tokens.pad_id))
    return dict(zip(names, values, strict=True))


def padded_sources(sources: Sequence[Sequence[int]], pad_id: int) -> dict[str, Array]:
    """Return the inputs of an encoder graph: sources padded on the right, and their lengths."""
    lengths = np.array([len(source) for source in sources], np.int32)
    ids = np.full((len(sources), lengths.max()), pad_id, np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    return {"source_ids": ids, "source_lengths": lengths}


def read_sources(
    sessions: Sessions, sources: Sequence[Sequence[int]], target_positions: int, measured: Sequence[str] = ()
) -> tuple[dict[str, Array], States]:
    """Read sources up to the first decoder step.

    Args:
        target_positions: smallest size of the axis that grows with the target.
        measured: further outputs of the decoder graph, whose shape depends on no input, to return
            for a decoder-only model, as the maximum over the runs that compute the prompts.

    Returns:
        The outputs of the encoder graph, and the states. For a decoder-only model, the outputs are
        `hidden` (B, S, M) and those of `measured`, and the states hold all tokens of a source but
        the last, which the first decoder step reads.
    """
    manifest = sessions.manifest
    if not manifest.is_decoder_only:
        encoded = encode(sessions, sources)
        return encoded, initial_states(manifest, encoded, target_positions)
    target_positions = max(target_positions, *map(len, sources))
    prefilled = [_prefill(sessions, source, target_positions, measured) for source in sources]
    hidden = [outputs.pop("hidden") for outputs, _ in prefilled]  # each (S, M)
    padded = np.zeros((len(sources), max(map(len, hidden)), hidden[0].shape[1]), np.float32)
    for row, array in enumerate(hidden):
        padded[row, : len(array)] = array
    largest = {name: np.max([outputs[name] for outputs, _ in prefilled], axis=0) for name in measured}
    return {"hidden": padded, **largest}, {
        state.input: np.concatenate([states[state.input] for _, states in prefilled]) for state in manifest.states
    }


def _prefill(
    sessions: Sessions, source: Sequence[int], target_positions: int, measured: Sequence[str]
) -> tuple[dict[str, Array], States]:
    """Read one prompt in chunks, as the service does; see `read_sources`."""
    manifest = sessions.manifest
    states = zero_states(manifest.states, 1, target_positions)
    ids, last = np.array([source], np.int64), len(source) - 1

    def read(states: States, first: int, stop: int, outputs: Sequence[str]) -> dict[str, Array]:
        chunk: dict[str, Array] = sessions.decoder.run(states, ids[:, first:stop], [first], ["hidden", *outputs])
        return chunk

    chunks = [
        read(states, first, min(first + PREFILL_TOKENS, last), measured) for first in range(0, last, PREFILL_TOKENS)
    ]
    largest = {name: np.max([chunk[name] for chunk in chunks], axis=0, initial=0) for name in measured}
    # The hidden state of the last token. The first decoder step must write its position itself.
    copies = {name: array.copy() for name, array in states.items()}
    chunks.append(read(copies, last, last + 1, ()))
    return {"hidden": np.concatenate([chunk["hidden"][0] for chunk in chunks]), **largest}, states


def initial_states(manifest: Manifest, encoded: Mapping[str, Array], target_positions: int) -> States:
    """Return the states of an encoder-decoder model before the first step; see `read_sources`."""
    batch_size, source_positions = encoded["hidden"].shape[:2]
    states = zero_states(manifest.states, batch_size, target_positions, source_positions)
    for state in manifest.states:
        if state.encoder_output is not None:
            states[state.input] = _grow(encoded[state.encoder_output], _target_axis(state), target_positions)
    return states


def zero_states(states: Sequence[State], rows: int, target: int, source: int = 0) -> States:
    """Return states of zeros for sequences with these sizes of the axes that grow."""
    sizes = {"target": target, "source": source}
    return {state.input: np.zeros((rows, *state.row_shape(sizes)), state.dtype) for state in states}


def _target_axis(state: State) -> int | None:
    """Return the index of the batched axis that grows with the target, or None."""
    return 1 + state.shape.index("target") if "target" in state.shape else None


def run_step(
    sessions: Sessions,
    states: States,
    token_ids: Sequence[int],
    lengths: Sequence[int],
    source_lengths: Sequence[int],
    outputs: Sequence[str],
) -> dict[str, Array]:
    """Run one decoder step with one token per row, and update the states in place.

    `lengths` has the number of tokens that each row has read before.
    """
    manifest, ids = sessions.manifest, np.array(token_ids, np.int64)
    if manifest.is_decoder_only:
        ids = ids[:, None]
    arrays: dict[str, Array] = sessions.decoder.run(states, ids, lengths, outputs, source_lengths)
    if not manifest.is_decoder_only:
        return arrays
    maps = {name for attention in manifest.attention for name in attention.outputs}
    # Attention maps (B, H, L, 1, columns) become (B, H, L, columns).
    return {name: array[:, :, :, 0] if name in maps else array for name, array in arrays.items()}


def onnx_steps(sessions: Sessions, source_ids: Sequence[int]) -> Callable[..., NDArray[np.float32]]:
    """Return the `NextLogits` function of a bundle for `sightline.model.decoding.search`, for one
    source, whose index it ignores.

    Each call reads the last token of each prefix and keeps the states, so that the next call can
    extend the prefixes. A prefix begins with the last token of `Manifest.decoder_prompt_ids`.
    """
    manifest = sessions.manifest
    num_prefilled = len(manifest.decoder_prompt_ids(source_ids)) - 1
    grows = {state.input: _target_axis(state) for state in manifest.states}
    known: dict[tuple[int, ...], States] = {(): read_sources(sessions, [source_ids], 0)[1]}

    def next_logits(prefixes: Sequence[Sequence[int]], _: Sequence[int] = ()) -> NDArray[np.float32]:
        parents = [tuple(prefix[:-1]) for prefix in prefixes]
        if any(parent not in known for parent in parents):
            next_logits(parents)
        states = {name: np.concatenate([known[parent][name] for parent in parents]) for name in known[parents[0]]}
        tokens, lengths = [prefix[-1] for prefix in prefixes], [num_prefilled + len(parent) for parent in parents]
        states = {name: _grow(array, grows[name], max(lengths) + 1) for name, array in states.items()}
        source_lengths = [len(source_ids)] * len(prefixes)
        outputs = run_step(sessions, states, tokens, lengths, source_lengths, ["logits"])
        root = known[()]
        known.clear()
        known[()] = root
        for row, prefix in enumerate(prefixes):
            known[tuple(prefix)] = {name: array[row : row + 1] for name, array in states.items()}
        logits: NDArray[np.float32] = outputs["logits"]
        return logits

    return next_logits


def _grow(state: Array, axis: int | None, positions: int) -> Array:
    """Pad a state that grows with the target to at least `positions` positions."""
    if axis is None or state.shape[axis] >= positions:
        return state
    missing = positions - state.shape[axis]
    return np.pad(state, [(0, missing if dimension == axis else 0) for dimension in range(state.ndim)])
