"""The rounding limits accept float32 results of every processor and reject typical mistakes."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sightline.model.architectures.transformer import Transformer
from sightline.model.config import TransformerConfig
from sightline.model.float32 import rounding_error
from sightline.model.layers.multi_head_attention import causal_mask
from sightline.model.rounding import Reference, reference
from tests.instruction_sets.__main__ import SETS, lesser_sets
from tests.rounding import assert_within_rounding, rounding_bound, rows_sum_to_one

SOURCE, TARGET = torch.tensor([[5, 17, 33, 9, 2]]), torch.tensor([[1, 8, 21, 30]])


@pytest.fixture
def model() -> Transformer:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = Transformer(TransformerConfig(40, d_model=32, num_heads=4, d_ff=64, encoder_layers=2, decoder_layers=2))
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def compute(model: Transformer) -> dict[str, NDArray[Any]]:
    lengths = torch.tensor([SOURCE.size(1)])
    with torch.inference_mode():
        maps = model.attention_maps(SOURCE, lengths, TARGET)
        arrays: dict[str, NDArray[Any]] = {kind: array.numpy() for kind, array in maps.items()}
        return {"logits": model(SOURCE, lengths, TARGET).numpy(), **arrays}


def test_float32_is_within_the_limits_and_close_to_them(model: Transformer) -> None:
    models = reference(model)
    assert_within_rounding(models, compute, compute(model))
    _, limits = models.limits(compute)
    assert max(limits.values()) < 1e-4


def change_one_weight(model: Transformer) -> None:
    model.decoder[1].feed_forward.outer.weight[3, 5] += 1e-3  # type: ignore[union-attr, index, operator]


def forget_the_scale(model: Transformer) -> None:
    """Compute attention without the factor 1 / sqrt(d_k)."""
    for layer in model.encoder:
        layer.self_attention.query.weight.mul_(8**0.5)  # type: ignore[union-attr, operator]


def shift_positions(model: Transformer) -> None:
    model.positions.copy_(model.positions.roll(1, dims=0))


def round_to_half(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


def swap_two_heads(model: Transformer) -> None:
    weight = model.decoder[0].cross_attention.value.weight  # type: ignore[union-attr]
    weight.copy_(weight.unflatten(0, (4, 8))[[1, 0, 2, 3]].flatten(0, 1))  # type: ignore[operator]


@pytest.mark.parametrize(
    "mistake", [change_one_weight, forget_the_scale, shift_positions, round_to_half, swap_two_heads]
)
def test_an_error_in_the_model_is_outside_the_limits(
    model: Transformer, mistake: Callable[[Transformer], None]
) -> None:
    models = reference(model)
    with torch.no_grad():
        mistake(model)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_within_rounding(models, compute, compute(model))


def test_a_mask_that_is_off_by_one_is_outside_the_limits(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    models, exact = reference(model), compute(reference(model).exact)
    _, limits = models.limits(compute)
    monkeypatch.setattr(
        "sightline.model.architectures.transformer.causal_mask",
        lambda *arguments: causal_mask(*arguments).roll(1, dims=1),
    )
    assert np.abs(compute(model)["logits"] - exact["logits"]).max() > limits["logits"]


def test_limits_follow_the_amplification_of_a_model() -> None:
    """Scores that are a thousand times larger have errors that are a thousand times larger."""

    def softmax_of(model: torch.nn.Linear) -> dict[str, NDArray[Any]]:
        with torch.inference_mode():
            scores = model(torch.ones(1, 16, dtype=model.weight.dtype))
            return {"scores": scores.numpy(), "weights": scores.softmax(dim=1).numpy()}

    limits = []
    for size in (1.0, 1000.0):
        linear = torch.nn.Linear(16, 2, bias=False)
        with torch.no_grad():
            linear.weight.copy_(size * torch.arange(1, 17).expand(2, 16))
        limits.append(reference(linear).limits(softmax_of)[1])
    small, large = limits
    assert large["scores"] == pytest.approx(1000 * small["scores"])
    assert large["weights"] > 100 * small["weights"]


def test_values_that_are_not_numbers_are_never_within_the_limits(model: Transformer) -> None:
    given = compute(model)
    given["logits"] = np.full_like(given["logits"], np.nan)
    with pytest.raises(AssertionError):
        assert_within_rounding(reference(model), compute, given)
    models: Reference[Transformer] = reference(model)
    with torch.no_grad():
        models.exact.embedding.weight[5] = torch.nan
    assert np.isnan(models.limits(compute)[1]["logits"])


def test_the_bound_of_a_sum_grows_with_its_root_and_holds_in_any_order() -> None:
    assert rounding_bound(16) == 8 * 2.0**-24 == rounding_error(16)
    generator = np.random.default_rng(0)
    for terms in (16, 256, 4096):
        products = generator.random(terms, np.float32)
        exact = float(products.astype(np.float64).sum())
        for order in (products, np.sort(products), np.sort(products)[::-1]):
            one_by_one = np.float32(0)
            for product in order:
                one_by_one += product
            assert abs(float(one_by_one) - exact) <= rounding_bound(terms, exact)
            assert abs(float(order.sum()) - exact) <= rounding_bound(terms, exact)


def test_rows_that_miss_a_weight_do_not_sum_to_one() -> None:
    weights = torch.randn(3, 50).softmax(dim=-1).numpy()
    assert rows_sum_to_one(weights)
    assert not rows_sum_to_one(weights * np.float32(1 + 1e-5))


@pytest.mark.skipif(not lesser_sets(torch.backends.cpu.get_cpu_capability()), reason="no lesser instruction set")
def test_the_narrowest_instruction_set_restricts_pytorch_and_numpy() -> None:
    asked = "import torch, numpy as np; print(torch.backends.cpu.get_cpu_capability())"
    asked += "; print(np.show_config(mode='dicts')['SIMD Extensions'].get('found', []))"
    environment = os.environ | SETS[-1].environment()
    given = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert given.stdout.split("\n")[:2] == ["DEFAULT", "[]"]


def test_the_lesser_sets_are_those_below_the_processors_own() -> None:
    assert [one.name for one in lesser_sets("AVX512")] == ["AVX2", "SSE4.2"]
    assert [one.name for one in lesser_sets("AVX2")] == ["SSE4.2"]
    assert lesser_sets("DEFAULT") == lesser_sets("SVE256") == ()
