"""Runs a bundle's graphs for verification: slow, one call at a time, the states updated in place as a service does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from model.decoding.reference import NextLogits
from service.bundle import Graph, Manifest, State

Array = NDArray[Any]
States = dict[str, Array]  # the step's input name to (B, ...)


@dataclass(frozen=True)
class Sessions:
    """A bundle loaded into ONNX Runtime on the CPU."""

    manifest: Manifest
    encoder: Any
    step: Any  # None where nothing is generated
    similar: Any  # None where the bundle compares no tokens


def open_sessions(folder: Path, manifest: Manifest) -> Sessions:
    """Load the graphs from their files; the weights are found beside them."""
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False  # shapes change with every call
    options.intra_op_num_threads = 1  # one row at a time: a second thread would mostly spin
    # Errors only: where keys have a free length, ONNX Runtime infers that maps of `Attention` are 0 wide, and warns at
    # every call that they are not.
    options.log_severity_level = 3

    def load(file: str) -> Any:
        return onnxruntime.InferenceSession(
            str(folder / file), options, ["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
        )

    def load_if_there(graph: Graph | None) -> Any:
        return None if graph is None else load(graph.file)

    step, similar = load_if_there(manifest.step), load_if_there(manifest.similar)
    return Sessions(manifest, load(manifest.encoder.file), step, similar)


def encode(sessions: Sessions, sources: Sequence[Sequence[int]]) -> dict[str, Array]:
    """All outputs of the encoder for sources of different lengths, padded on the right."""
    lengths = np.array([len(source) for source in sources], np.int32)
    ids = np.full((len(sources), lengths.max()), sessions.manifest.tokens.pad_id, np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    names = sessions.manifest.encoder.outputs
    values = sessions.encoder.run(list(names), {"source_ids": ids, "source_lengths": lengths})
    return dict(zip(names, values, strict=True))


def compare_tokens(sessions: Sessions, token_ids: NDArray[np.int64]) -> Array:
    """(N, V): each token's embedding compared with all."""
    (compared,) = sessions.similar.run(["cosines"], {"token_ids": token_ids})
    return np.asarray(compared)


def initial_states(manifest: Manifest, encoded: Mapping[str, Array], target_slots: int) -> States:
    """What the states hold before the first step.

    Args:
        encoded: what `encode` gave.
        target_slots: smallest size of the axis that grows with the target.
    """
    rows, source_slots = encoded["hidden"].shape[:2]
    sizes = {"source": source_slots, "target": target_slots}
    states: States = {}
    for state in manifest.states:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in state.shape]
        name = state.encoder_output
        filled = np.zeros((rows, *shape), state.dtype) if name is None else encoded[name]
        states[state.input] = _with_slots(filled, _target_axis(state), target_slots)
    return states


def _target_axis(state: State) -> int | None:
    """The axis that grows with the target, of many rows; None where there is none."""
    return 1 + state.shape.index("target") if "target" in state.shape else None


def run_step(
    sessions: Sessions,
    states: States,
    token_ids: Sequence[int],
    lengths: Sequence[int],
    source_lengths: Sequence[int],
    outputs: Sequence[str],
) -> dict[str, Array]:
    """Read one token a row; `states` are updated in place, only `outputs` are fetched."""
    manifest, binding = sessions.manifest, sessions.step.io_binding()
    rows = {
        "token_ids": np.array(token_ids, np.int64),
        "lengths": np.array(lengths, np.int32),
        "source_lengths": np.array(source_lengths, np.int32),
    }
    for name in rows.keys() & set(manifest.decoder.inputs):
        binding.bind_cpu_input(name, rows[name])
    for state in manifest.states:
        memory = onnxruntime.OrtValue.ortvalue_from_numpy(states[state.input])
        binding.bind_ortvalue_input(state.input, memory)
        if state.output is not None:
            binding.bind_ortvalue_output(state.output, memory)
    for name in outputs:
        binding.bind_output(name, "cpu")
    sessions.step.run_with_iobinding(binding)
    values = binding.get_outputs()[-len(outputs) :]  # bound last
    return {name: value.numpy() for name, value in zip(outputs, values, strict=True)}


def onnx_steps(sessions: Sessions, source_ids: Sequence[int]) -> NextLogits:
    """Return the decoder step of a bundle as `model.decoding.reference` takes it.

    Each call reads one more token of each prefix and keeps the state of what it has read.

    Args:
        source_ids: one source; a prefix begins with the last of `Manifest.beginning`.
    """
    manifest = sessions.manifest
    num_filled = len(manifest.beginning(source_ids)) - 1
    grows = {state.input: _target_axis(state) for state in manifest.states}
    known: dict[tuple[int, ...], States] = {(): initial_states(manifest, encode(sessions, [source_ids]), 0)}

    def next_logits(prefixes: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        parents = [tuple(prefix[:-1]) for prefix in prefixes]
        if any(parent not in known for parent in parents):
            next_logits(parents)
        states = {name: np.concatenate([known[parent][name] for parent in parents]) for name in known[parents[0]]}
        tokens, lengths = [prefix[-1] for prefix in prefixes], [num_filled + len(parent) for parent in parents]
        states = {name: _with_slots(array, grows[name], max(lengths) + 1) for name, array in states.items()}
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


def _with_slots(rows: Array, axis: int | None, slots: int) -> Array:
    """Room for so many target tokens at the least, where the state grows with the target."""
    if axis is None or rows.shape[axis] >= slots:
        return rows
    missing = slots - rows.shape[axis]
    return np.pad(rows, [(0, missing if dimension == axis else 0) for dimension in range(rows.ndim)])
