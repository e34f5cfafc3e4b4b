"""Right models of all families and scales of weights are accepted, and planted errors are found.

Right models must be accepted, so the ratio of each difference to its limit must be at most 1. The
effect of an error can be smaller than rounding. Decision record 26 has a table of results.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.export.check.verify import ComparedTexts, GraphRunner, differences_of, random_inputs, rounding_limits
from sightline.export.families.description import Attention, Description, Stack
from sightline.export.families.table import describe, find_family
from sightline.export.families.weights import Weights
from sightline.export.sources.opened_checkpoint import Folder
from tests.export.graph_bundles import write_bundle
from tests.zoo.models import MODELS, Tiny, random_model

Array = NDArray[Any]
SCALES = (0.02, 0.1, 0.3, 0.5, 1.0)  # standard deviations of weights
POSITIONS = (30, 64, 150)


class ChangedWeights(Weights):
    """Weights of which one is changed."""

    def __init__(self, weights: Weights, name: str, change: Callable[[Array], Array]) -> None:
        self._weights = weights
        self._name = name
        self._change = change

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def read(self, name: str) -> NDArray[np.float32]:
        array = self._weights.read(name)
        return self._change(array.copy()).astype(np.float32) if name == self._name else array


Wrong = tuple[Description, Weights]
Plant = Callable[[Description, Weights, np.random.Generator], Wrong | None]


def _last_stack(model: Description) -> str:
    return "encoder" if model.decoder is None else "decoder"


def _stacks(change: Callable[[Stack], Stack], *, only_last: bool = False) -> Plant:
    """Change all stacks, or only the last one."""

    def plant(model: Description, weights: Weights, draw: np.random.Generator) -> Wrong | None:
        names = [_last_stack(model)] if only_last else ["encoder", "decoder"]
        stacks: dict[str, Any] = {name: change(stack) for name in names if (stack := getattr(model, name)) is not None}
        changed = replace(model, **stacks)
        return None if changed == model else (changed, weights)

    return plant


def _attention(change: Callable[[Attention], Attention]) -> Plant:
    """Change the attention of the last layer."""
    return _stacks(
        lambda stack: replace(stack, attention=(*stack.attention[:-1], change(stack.attention[-1]))), only_last=True
    )


def _matrix(change: Callable[[Array, np.random.Generator], Array]) -> Plant:
    """Change one matrix of a random layer."""

    def plant(model: Description, weights: Weights, draw: np.random.Generator) -> Wrong:
        names = [name for name in ("encoder", "decoder") if getattr(model, name) is not None]
        name = str(draw.choice(names))
        parts = ("self_attention.query", "self_attention.value", "self_attention.output")
        part = draw.choice([*parts, "feed_forward.inner", "feed_forward.outer"])
        matrix = f"{name}.{draw.integers(getattr(model, name).layers)}.{part}.weight"
        seed = int(draw.integers(1 << 30))
        return model, ChangedWeights(weights, matrix, lambda array: change(array, np.random.default_rng(seed)))

    return plant


def _positions(model: Description, weights: Weights, draw: np.random.Generator) -> Wrong | None:
    name = _last_stack(model)
    if not getattr(model, name).embedding.has_positions:
        return None
    return model, ChangedWeights(weights, f"{name}.positions.weight", lambda array: np.roll(array, 1, axis=0))


def _other_base(attention: Attention) -> Attention:
    if attention.rotary is None:
        return attention
    frequencies = tuple(frequency**1.02 for frequency in attention.rotary.frequencies)
    return replace(attention, rotary=replace(attention.rotary, frequencies=frequencies))


def _other_gelu(stack: Stack) -> Stack:
    others: Mapping[str, Any] = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}
    activation = stack.feed_forward.activation
    return replace(stack, feed_forward=replace(stack.feed_forward, activation=others.get(activation, activation)))


def _epsilon(change: Callable[[float], float]) -> Plant:
    return _stacks(lambda stack: replace(stack, norm=replace(stack.norm, epsilon=change(stack.norm.epsilon))))


def _add_to_one(array: Array, draw: np.random.Generator, deviations: float) -> Array:
    array.flat[draw.integers(array.size)] += deviations * array.std()
    return array


ERRORS: Mapping[str, Plant] = {
    "missing scale": _attention(lambda attention: replace(attention, scale=1.0)),
    "scale 0.1 % off": _attention(lambda attention: replace(attention, scale=1.001 * attention.scale)),
    "rope base": _attention(_other_base),
    "positions off by one": _positions,
    "one weight by 1 deviation": _matrix(lambda array, draw: _add_to_one(array, draw, 1.0)),
    "one weight by 0.01 deviations": _matrix(lambda array, draw: _add_to_one(array, draw, 0.01)),
    "one matrix in float16": _matrix(lambda array, draw: array.astype(np.float16)),
    "other gelu": _stacks(_other_gelu),
    "epsilon x 100": _epsilon(lambda epsilon: 100 * epsilon),
    "epsilon 1e-5 for 1e-6": _epsilon(lambda epsilon: 1e-5 if epsilon == 1e-6 else epsilon),
}


def check_model(tiny: Tiny, seed: int, scale: float, *, plants_errors: bool = False) -> tuple[float, dict[str, float]]:
    """Check the right graphs of a random model, and graphs with planted errors. Returns the largest
    ratio of a difference to its limit, NaN included as infinity, and that of each error that the
    model can have.
    """
    draw = np.random.default_rng([seed, 7])
    positions = int(draw.choice(POSITIONS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_model(tiny.config(), tiny.architectures[0], scale, seed).save_pretrained(folder)
        opened = Folder(folder)
        model, weights = describe(find_family(opened.config), opened.config, opened.tensors, input_names=())
        known: dict[ComparedTexts, tuple[dict[str, Array], dict[str, float]]] = {}

        def ratio(built: Description, used: Weights) -> float:
            """Return the ratio for graphs of a changed model."""
            manifest = write_bundle(folder, built, used, positions)
            texts, outputs = GraphRunner(folder, manifest, built).run(*random_inputs(manifest, built, seed))
            if texts not in known:
                known[texts] = rounding_limits(model, weights, texts)
            exact, limits = known[texts]
            ratios = [difference / limits[name] for name, difference in differences_of(outputs, exact).items()]
            return max(math.inf if math.isnan(quotient) else quotient for quotient in ratios)

        right, planted = ratio(model, weights), dict[str, float]()
        for error, plant in ERRORS.items() if plants_errors else ():
            wrong = plant(model, weights, draw)
            if wrong is not None:
                planted[error] = ratio(*wrong)
    return right, planted


# Rejected by limits that were derived from errors of the weights, with weights of scale 1.
ODD_T5 = Tiny("T5", {
    "d_model": 80, "d_kv": 24, "d_ff": 144, "num_layers": 2, "num_decoder_layers": 3, "vocab_size": 701,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}, ("ForConditionalGeneration",))  # fmt: skip


@pytest.mark.parametrize("seed", [0, 2])
def test_a_t5_of_odd_sizes_is_accepted(seed: int) -> None:
    """Short texts and large weights saturate the softmax of most rows."""
    assert check_model(ODD_T5, seed, scale=1.0)[0] < 0.8


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "gpt2", "t5", "bart"])
def test_random_models_with_large_weights_are_accepted(name: str) -> None:
    assert check_model(MODELS[name], seed=1, scale=1.0)[0] < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_random_models_are_accepted(name: str, scale: float) -> None:
    assert check_model(MODELS[name], seed=2, scale=scale)[0] <= 1


@pytest.mark.parametrize(("name", "seed"), [("roberta", 3), ("llama", 1), ("bart", 4)])
def test_planted_errors_are_found(name: str, seed: int) -> None:
    right, planted = check_model(MODELS[name], seed, scale=0.3, plants_errors=True)
    assert right < 0.8
    assert len(planted) == 8
    assert [error for error, ratio in planted.items() if not ratio > 1] == []
