import numpy as np
import pytest

from lab.study.maps import cumulative, entropies, rollout, share_of_rank


def test_rollout_multiplies_the_layers_with_half_of_the_residual() -> None:
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.ones(5), size=(3, 2, 5))
    found = rollout(weights)
    expected = np.eye(5)
    for layer in range(3):
        mean = (weights[layer, 0] + weights[layer, 1]) / 2
        expected = np.array(
            [[sum((mean[i, k] + (i == k)) / 2 * expected[k, j] for k in range(5)) for j in range(5)] for i in range(5)]
        )
        np.testing.assert_allclose(found[layer], expected, atol=1e-12)
        np.testing.assert_allclose(found[layer].sum(axis=1), 1)


def test_entropy_is_in_bits() -> None:
    rows = np.array([[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0]])
    assert entropies(rows) == pytest.approx([0, 2, 1])


def test_a_map_of_equal_rows_has_one_singular_value_and_a_diagonal_needs_all() -> None:
    equal, diagonal = np.full((10, 10), 0.1), np.eye(10)
    assert share_of_rank(equal, 0.9) == pytest.approx(0.1)
    assert share_of_rank(diagonal, 0.9) == pytest.approx(0.9)
    assert cumulative(diagonal) == pytest.approx(np.arange(1, 11) / 10)
