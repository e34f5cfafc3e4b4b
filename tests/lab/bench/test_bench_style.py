from itertools import pairwise

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.text import Text

from lab.bench.style import LineLabel, format_number, label_lines, spread, style, use_log_scale


@pytest.mark.parametrize(
    ("values", "moved"),
    [
        ([], []),
        ([3.0], [3.0]),
        ([0.0, 20.0], [0.0, 20.0]),
        ([5.0, 5.0], [0.0, 10.0]),
        ([0.0, 1.0, 2.0, 50.0], [-9.0, 1.0, 11.0, 50.0]),
        ([0.0, 15.0, 15.0], [0.0, 10.0, 20.0]),
    ],
)
def test_labels_move_as_little_as_possible(values: list[float], moved: list[float]) -> None:
    assert spread(values, 10) == pytest.approx(moved)


def test_no_other_positions_are_nearer_than_those_of_spread() -> None:
    rng = np.random.default_rng(1)
    values = np.sort(rng.uniform(0, 40, 6))
    cost = np.square(spread(values.tolist(), 10) - values).sum()
    first, gaps = rng.uniform(-30, 10, (20000, 1)), 10 + rng.exponential(1, (20000, 5))
    others = np.concatenate([first, first + gaps.cumsum(axis=1)], axis=1)
    assert (np.square(others - values).sum(axis=1) >= cost).all()


def test_labels_of_lines_with_the_same_end_do_not_overlap() -> None:
    with style():
        figure, axes = pyplot.subplots()
        axes.set_ylim(0, 1)
        label_lines(axes, [LineLabel(text, 1.0, 0.5, "black") for text in ("first", "second", "third")])
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to the point
        assert all(lower.y1 <= upper.y0 for lower, upper in pairwise(boxes))
        assert {round(box.x0) for box in boxes} == {round(boxes[0].x0)}
        assert boxes[0].x0 > axes.get_window_extent().x1
        pyplot.close(figure)


def test_log_axes_have_ordinary_numbers() -> None:
    with style():
        figure, axes = pyplot.subplots()
        axes.plot([1, 2], [0.3, 3000])
        use_log_scale(axes, "y")
        figure.draw_without_rendering()
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert {"0.5", "1", "2", "1,000"} <= set(labels)
        assert axes.get_xscale() == "linear"
        pyplot.close(figure)


def test_numbers_of_ticks_have_no_exponent() -> None:
    assert [format_number(value) for value in (0.001, 0.5, 2, 1e6)] == ["0.001", "0.5", "2", "1,000,000"]
