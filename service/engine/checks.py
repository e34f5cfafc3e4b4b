"""Checks of a runner's results: finite first states, and a known input that tells a broken graph from a bad call."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.bundle import State
from service.engine.generation import NotFiniteError
from service.engine.scores import ALWAYS
from service.runtime.protocol import Runner

Array = NDArray[Any]
GraphName = Literal["encoder", "step"]

KNOWN_TOKENS = 16  # of the known input, end tokens all of them, as in the rehearsal when a bundle is loaded


def not_finite(states: Sequence[State], encoded: Mapping[str, Array], num_tokens: Sequence[int]) -> set[int]:
    """Find the examples whose first states hold NaN or infinity, outside their padding.

    The decoder does not always pass these on to its scores: quantised products turn NaN into integers, and the sigmoid
    and tanh of ONNX Runtime's recurrent cells clamp it. States in the memory of a device are not read back: they belong
    to Transformers in float16, which do pass them on.

    Args:
        states: of the decoder.
        encoded: the encoder's outputs.
        num_tokens: source tokens of each example.
    """
    found: set[int] = set()
    for state in states:
        value = encoded.get(state.encoder_output or "")
        if not isinstance(value, np.ndarray) or np.isfinite(value).all():
            continue
        for index, size in enumerate(num_tokens):
            used: tuple[Any, ...] = tuple(slice(size if isinstance(axis, str) else axis) for axis in state.shape)
            if not np.isfinite(value[index][used]).all():
                found.add(index)
    return found


def run_known_input(runner: Runner, graph: GraphName) -> None:
    """Run the encoder, and for the graph "step" also the decoder in row 0, which must be free, on a short known input.

    Raises:
        Exception: the graph fails, or gives numbers that are not finite.
    """
    manifest = runner.manifest
    limits = manifest.limits
    size = min(KNOWN_TOKENS, limits.max_source_tokens, limits.max_target_tokens or KNOWN_TOKENS)
    source = (manifest.tokens.end_id,) * size
    filling = {state.encoder_output for state in manifest.states}
    names = [name for name in manifest.encoder.outputs if name == "hidden" or name in filling]
    lengths = np.array([size], np.int32)
    encoded = runner.encode(np.array([source], np.int64), lengths, names)
    _check_finite([value for value in encoded.values() if isinstance(value, np.ndarray)])
    if graph == "step":
        read = manifest.beginning(source)
        runner.fill(0, encoded, [0])
        scores = runner.step(
            np.array(read[-1:], np.int64), np.array([len(read) - 1], np.int32), lengths, sorted(ALWAYS)
        )
        _check_finite([scores["top_logprobs"]])


def _check_finite(values: Sequence[Array]) -> None:
    if not all(np.isfinite(value).all() for value in values):
        raise NotFiniteError
