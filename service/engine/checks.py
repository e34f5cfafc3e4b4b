"""Checks of a runner: initial states must be finite, and a test input tells a broken graph from
calls that fail.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from sightline.base.bundle import TOP_OUTPUTS, State
from sightline.service.engine.generation import NonFiniteError
from sightline.service.runtime.runner import Array, Runner

GraphName = Literal["encoder", "prefill", "decoder"]  # "prefill": the decoder graph over a prompt

TEST_INPUT_TOKENS = 16  # length of the test input, which consists of end tokens
# Consecutive failures of one graph, from distinct calls, before the test input is run.
MAX_FAILURES = 8
# Parts of messages about failures.
_FAILED: Mapping[GraphName, str] = {
    "encoder": "encoder graph failed for",
    "prefill": "decoder graph failed on prompts of",
    "decoder": "decoder graph failed for",
}
logger = logging.getLogger(__name__)


def find_non_finite(states: Sequence[State], encoded: Mapping[str, Array], num_tokens: Sequence[int]) -> set[int]:
    """Return the indices of sequences with NaN or infinity in their initial states.

    Padding is not checked. The scores of the decoder do not always show this: quantised products
    convert NaN to integers, and the sigmoid and tanh of ONNX Runtime's recurrent cells clamp it.
    States in device memory are not checked: they belong to float16 Transformers, whose scores do
    become NaN. Integers cannot show it, so the hidden states are checked that they came from:
    `encoded` must have the `checked_outputs`.
    """
    non_finite: set[int] = set()
    for name, shape in checked_outputs(states).items():
        value = encoded.get(name)
        if not isinstance(value, np.ndarray) or np.isfinite(value).all():
            continue
        for index, size in enumerate(num_tokens):
            used: tuple[Any, ...] = tuple(slice(size if isinstance(axis, str) else axis) for axis in shape)
            if not np.isfinite(value[index][used]).all():
                non_finite.add(index)
    return non_finite


def checked_outputs(states: Sequence[State]) -> dict[str, tuple[int | str, ...]]:
    """Return the encoder outputs that show NaN in initial states, and the shapes of their rows."""
    initial = [state for state in states if state.encoder_output is not None]
    shapes: dict[str, tuple[int | str, ...]] = {
        str(state.encoder_output): state.shape for state in initial if state.dtype != "int8"
    }
    if len(shapes) < len(initial):
        shapes["hidden"] = ("source",)
    return shapes


def run_test_input(runner: Runner, graph: GraphName, row: int = 0) -> None:
    """Run a graph on the test input; raise if it fails or returns NaN or infinity.

    The decoder needs a free row and the results of the encoder or prefill, which then runs too.
    """
    manifest = runner.manifest
    limits = manifest.limits
    size = min(TEST_INPUT_TOKENS, limits.max_source_tokens, limits.max_target_tokens or TEST_INPUT_TOKENS)
    source = (manifest.tokens.end_id,) * size
    lengths, encoded = np.array([size], np.int32), dict[str, Array]()
    if not manifest.is_decoder_only:
        initial = {state.encoder_output for state in manifest.states}
        names = [name for name in manifest.encoder_graph.outputs if name == "hidden" or name in initial]
        encoded |= runner.run_encoder(np.array([source], np.int64), lengths, names)
        _check_finite([value for value in encoded.values() if isinstance(value, np.ndarray)])
    if graph == "encoder":
        return
    *prompt, last = manifest.decoder_prompt_ids(source)
    runner.init_rows(row, encoded, [0])
    age = 0
    if manifest.is_decoder_only and prompt:
        _check_finite(list(runner.prefill(row, np.array(prompt, np.int64), 0, ["hidden"]).values()))
        age = len(prompt)
    if graph == "decoder":
        for number, token_id in enumerate([*prompt, last][age:], start=age):
            ages = np.array([number], np.int32)
            scores = runner.step(np.array([token_id], np.int64), ages, lengths, sorted(TOP_OUTPUTS), first=row)
            _check_finite([scores["top_logprobs"]])


def _check_finite(values: Sequence[Array]) -> None:
    if not all(np.isfinite(value).all() for value in values):
        raise NonFiniteError


class RuntimeFailedError(Exception):
    """A graph fails even on the test input, for example because the device is broken.

    The engine cannot serve any request after this error.
    """


class GraphFailures:
    """Consecutive failed runs of each graph."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # Request ids of the failed runs; requests of a call share one.
        self._failed: dict[GraphName, set[str]] = {graph: set() for graph in _FAILED}

    def on_success(self, graph: GraphName) -> None:
        self._failed[graph].clear()

    def add(self, graph: GraphName, request_id: str, free_row: int) -> None:
        """Count a failed run; the test input may use the row `free_row`.

        Raises `RuntimeFailedError` if the graph failed `MAX_FAILURES` times in succession, for
        distinct calls, and also fails on the test input.
        """
        failed = self._failed[graph]
        failed.add(request_id)
        if len(failed) < MAX_FAILURES:
            return
        try:
            run_test_input(self._runner, graph, free_row)
        except Exception as error:
            raise RuntimeFailedError(
                f"the {_FAILED[graph]} {MAX_FAILURES} calls in succession and on the test input"
            ) from error
        logger.warning(
            "the %s %d calls in succession, but not on the test input: the calls caused the failures",
            _FAILED[graph],
            MAX_FAILURES,
        )
        failed.clear()
