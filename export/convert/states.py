"""8-bit states: keys and values of a decoder's attention as signed integers.

`GroupQueryAttention` of ONNX Runtime reads such states with a scale for each channel of each head
and computes in float32. A step then reads a quarter of the memory, which is most of the time of
many rows. Keys and values of new tokens are rounded when they are written; those of the source are
rounded by the encoder. The rounding of a row does not depend on the other rows.

Only encoder-decoders have 8-bit states: with several new tokens, as in the prompt of a decoder-only
model, the operator takes 3.5 times as long as with float32 states.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from sightline.base.bundle import Manifest, State
from sightline.export.check.alignment import sentences_of
from sightline.export.check.sessions import open_sessions, read_sources, run_step
from sightline.export.convert.text_quality import text_ids
from sightline.model.data.tokenizer_training import read_tokenizer

LEVELS = 127  # on each side of zero
# Few sentences are read, and values beyond their range are clipped.
MARGIN = 1.5
NUM_RANDOM, RANDOM_TOKENS = 10, 16  # sources of random tokens: a first layer depends on each token's embedding
MAX_NEW_TOKENS = 64
INPUT_KEY, INPUT_VALUE, INPUT_SCALE = 3, 4, 12  # positions of inputs of `GroupQueryAttention`

# Largest magnitude of each channel of a state, (heads, channels), by input of the decoder graph.
StateRanges = Mapping[str, NDArray[np.float32]]


def measure_states(folder: Path, manifest: Manifest) -> StateRanges:
    """Measure the ranges of keys and values on sentences in the source language and random tokens.

    The ranges of a float32 bundle get a margin; they are empty if no state can be rounded.
    """
    candidates = manifest.states if manifest.encoder is not None else ()
    # Keys or values: (heads, "source" or "target", channels).
    measured = [state for state in candidates if len(state.shape) == 3 and isinstance(state.shape[1], str)]
    if not measured:
        return {}
    sessions = open_sessions(folder, manifest)
    ranges: dict[str, NDArray[np.float32]] = {}
    for source in calibration_sources(folder, manifest):
        tokens = list(manifest.decoder_prompt_ids(source))  # of some models, they end with an end token
        positions = len(tokens) - 1 + min(MAX_NEW_TOKENS, manifest.max_new_tokens_for(len(source)))
        _, states = read_sources(sessions, [source], positions)
        for position in range(positions):
            outputs = run_step(sessions, states, [tokens[position]], [position], [len(source)], ["top_ids"])
            if position + 1 == len(tokens):
                tokens.append(int(outputs["top_ids"][0, 0]))
                if tokens[-1] in manifest.tokens.end_ids:
                    break
        for state in measured:
            visible = states[state.input][0, :, : len(source) if "source" in state.shape else len(tokens) - 1]
            largest = np.abs(visible).max(axis=1)
            ranges[state.input] = np.maximum(ranges.get(state.input, largest), largest)
    return {name: MARGIN * values for name, values in ranges.items()}


def calibration_sources(folder: Path, manifest: Manifest) -> Iterator[Sequence[int]]:
    """Return sentences in the source language of a model, and random tokens."""
    limit = manifest.limits.max_source_tokens
    tokenizer = read_tokenizer(folder / manifest.source_tokenizer)
    yield from (ids for ids in text_ids(manifest, tokenizer, sentences_of(manifest)) if len(ids) <= limit)
    generator = np.random.default_rng(0)
    vocabulary = manifest.limits.source_vocabulary or manifest.limits.vocabulary
    yield from generator.integers(vocabulary, size=(NUM_RANDOM, min(RANDOM_TOKENS, limit))).tolist()


def rounded_states(manifest: Manifest, ranges: StateRanges) -> tuple[State, ...]:
    """Return the states of the bundle after `round_states`."""
    return tuple(
        state.model_copy(update={"dtype": "int8", "output": _output(state.input)}) if state.input in ranges else state
        for state in manifest.states
    )


def round_states(models: Sequence[onnx.ModelProto], ranges: StateRanges) -> None:
    """Change the graphs `encoder` and `step` of a bundle in place, so that the states are codes."""
    # The value of a code. Channels that are always 0, such as padding, have the scale 1.
    scales = {name: np.where(of > 0, of / np.float32(LEVELS), np.float32(1)) for name, of in ranges.items()}
    for model in models:
        if model.graph.name == "encoder":
            _round_sources(model.graph, scales)
        elif model.graph.name == "step":
            _round_cache(model.graph, scales)


def _output(name: str) -> str:
    """Return the output of a state: `self_key.0` is written to `self_key_out.0`."""
    kind, layer = name.split(".")
    return f"{kind}_out.{layer}"


def _round_cache(graph: onnx.GraphProto, scales: Mapping[str, NDArray[np.float32]]) -> None:
    values = {value.name: value for value in (*graph.input, *graph.output)}
    for name in scales:
        output = _output(name)
        values[name].type.tensor_type.elem_type = TensorProto.INT8
        if output not in values:  # states of the source do not change, but the operator needs an output
            new = graph.output.add()
            new.CopyFrom(values[name])
            new.name = output
        else:
            values[output].type.tensor_type.elem_type = TensorProto.INT8
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            graph.initializer.extend(_use_codes(node, scales))


def _use_codes(node: NodeProto, scales: Mapping[str, NDArray[np.float32]]) -> Iterator[TensorProto]:
    """Let attention read 8-bit keys and values, and return the constants with their scales."""
    cache = (node.input[INPUT_KEY], node.input[INPUT_VALUE])
    node.input.extend([""] * (INPUT_SCALE - len(node.input)))
    for index, name in enumerate(cache):
        node.input.append(f"{name}.scales")
        node.output[1 + index] = _output(name)
        yield numpy_helper.from_array(scales[name].reshape(-1), f"{name}.scales")
    per_channel = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in per_channel.items())


def _round_sources(graph: onnx.GraphProto, scales: Mapping[str, NDArray[np.float32]]) -> None:
    """Round the keys and values of the source, which one node splits by layer: (B, 2L * KV, S, D).

    They are first scaled by channel, because rounding with one scale is vectorized.
    """
    (index,) = (index for index, node in enumerate(graph.node) if scales.keys() & set(node.output))
    split = graph.node[index]
    steps = np.concatenate([scales[name] for name in split.output])  # (2L * KV, D)
    constants = {"states.per_code": (1 / steps)[:, None], "states.one": np.float32(1), "states.zero": np.int8(0)}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    scaled = helper.make_node("Mul", [split.input[0], "states.per_code"], ["states.scaled"], "states.scale")
    inputs = [scaled.output[0], "states.one", "states.zero"]
    rounded = helper.make_node("QuantizeLinear", inputs, ["states.codes"], "states.round")
    split.input[0] = rounded.output[0]
    for new in (rounded, scaled):
        graph.node.insert(index, new)
    for value in graph.output:
        if value.name in scales:
            value.type.tensor_type.elem_type = TensorProto.INT8
