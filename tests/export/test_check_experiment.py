"""Right models of unusual sizes and weights are accepted, and planted errors are found."""

from collections.abc import Iterator

import pytest
import torch

from tests.export.check_experiment import FAMILIES, ODD_T5, check_model, random_options


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(2))
def test_a_t5_of_odd_sizes_is_accepted(seed: int) -> None:
    """Short texts and large weights saturate the softmax of most rows."""
    assert check_model("T5ForConditionalGeneration", ODD_T5, seed, scale=1.0).right < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_with_large_weights_are_accepted(family: str) -> None:
    assert check_model(*random_options(family, 1), seed=1, scale=1.0).right < 0.5


@pytest.mark.parametrize("family", ["bert", "llama", "bart"])
def test_planted_errors_are_found(family: str) -> None:
    result = check_model(*random_options(family, 2), seed=2, scale=0.3, plants_errors=True)
    assert result.right < 0.5
    missed = {error for error, ratio in result.planted.items() if ratio <= 1}
    assert len(result.planted) >= 7
    # The effects of these two can be below rounding.
    assert missed <= {"one weight by 0.01 deviations", "epsilon 1e-5 for 1e-6"}
