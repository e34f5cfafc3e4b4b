"""Right models of unusual sizes and weights are accepted, and planted errors are found."""

import pytest

from lab.study.check_limits import FAMILIES, Options, check_model, random_options

# Rejected by limits that were derived from errors of the weights, with weights of scale 1.
ODD_T5: Options = {
    "d_model": 80, "d_kv": 24, "d_ff": 144, "num_layers": 2, "num_decoder_layers": 3, "vocab_size": 701,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 2])
def test_a_t5_of_odd_sizes_is_accepted(seed: int) -> None:
    """Short texts and large weights saturate the softmax of most rows."""
    assert check_model("T5ForConditionalGeneration", ODD_T5, seed, scale=1.0)[0] < 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_with_large_weights_are_accepted(family: str) -> None:
    assert check_model(*random_options(family, 1), seed=1, scale=1.0)[0] < 0.8


@pytest.mark.parametrize(("family", "seed"), [("bert", 3), ("llama", 1), ("bart", 4)])
def test_planted_errors_are_found(family: str, seed: int) -> None:
    right, planted = check_model(*random_options(family, seed), seed, scale=0.3, plants_errors=True)
    assert right < 0.8
    assert len(planted) == 8
    assert [error for error, ratio in planted.items() if not ratio > 1] == []
