import numpy as np
import pytest

from lab.bench.style import spread
from tests.support.tables import read_table


@pytest.mark.parametrize(("values", "moved"), read_table(__file__))
def test_labels_move_as_little_as_possible(values: list[float], moved: list[float]) -> None:
    assert spread(values, 10) == pytest.approx(moved)


def test_no_other_positions_are_nearer_than_those_of_spread() -> None:
    rng = np.random.default_rng(1)
    values = np.sort(rng.uniform(0, 40, 6))
    cost = np.square(spread(values.tolist(), 10) - values).sum()
    first, gaps = rng.uniform(-30, 10, (20000, 1)), 10 + rng.exponential(1, (20000, 5))
    others = np.concatenate([first, first + gaps.cumsum(axis=1)], axis=1)
    assert (np.square(others - values).sum(axis=1) >= cost).all()
