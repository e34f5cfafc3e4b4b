import numpy as np
import pytest

from sightline.service.inference.statistics import MapAxes, head_statistics


def axes(rows: str, columns: str, first: int | None = None) -> MapAxes:
    """Return axes from strings in which `s` stands for a special token."""
    special_rows, special_columns = (np.array([one == "s" for one in axis]) for axis in (rows, columns))
    return MapAxes(special_rows, special_columns, first)


def test_a_head_that_attends_to_itself() -> None:
    maps = np.eye(4, dtype=np.float32)[None, None]
    (found,) = head_statistics(maps, [0], [0], axes("...s", "...s", 0))
    assert (found.entropy, found.mean_distance, found.diagonal_share, found.special_share) == (0.0, 0.0, 1.0, 0.25)


def test_a_head_with_equal_weights() -> None:
    maps = np.full((1, 1, 3, 8), 1 / 8, np.float32)
    (found,) = head_statistics(maps, [0], [0], axes("...", "s.......", None))
    assert found.entropy == pytest.approx(3)
    # Every row has the mean position in the middle of the source.
    assert found.mean_distance == pytest.approx((1 / 3 + 0 + 1 / 3) / 3)
    assert found.special_share == pytest.approx(1 / 8)
    assert found.diagonal_share is None


def test_rows_are_divided_by_their_sum_and_rows_of_zeros_are_left_out() -> None:
    maps = np.array([[[[0.2, 0.2], [0, 0], [0, 0.1]]]], np.float32)
    (found,) = head_statistics(maps, [0], [0], axes("...", ".s", None))
    assert found.entropy == pytest.approx(0.5) and found.special_share == pytest.approx(0.75)


@pytest.mark.parametrize("maps", [np.array([[1.5, -0.5]]), np.zeros((0, 2)), np.zeros((2, 2))])
def test_maps_without_weights_and_with_negative_weights_have_no_statistics(maps: np.ndarray) -> None:
    one = maps[None, None].astype(np.float32)
    (found,) = head_statistics(one, [0], [0], axes("." * len(maps), "..", 0))
    assert [found.entropy, found.mean_distance, found.special_share, found.diagonal_share] == [None] * 4


def test_decoder_rows_belong_to_the_token_that_they_read() -> None:
    # Two tokens of the prompt precede the first row, which reads the second of them.
    maps = np.array([[[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]]], np.float32)
    (found,) = head_statistics(maps, [0], [0], axes("..s", "s...", 1))
    assert found.mean_distance == pytest.approx(1 / 3)
    assert found.diagonal_share == pytest.approx(2 / 3)


def test_agreement_compares_the_strongest_columns_without_special_tokens() -> None:
    alignment = np.array([[0.6, 0.1, 0.3], [0.1, 0.2, 0.7], [0.5, 0.2, 0.3]], np.float32)
    head = np.array([[0.5, 0.0, 0.5], [0.3, 0.1, 0.6], [0, 1, 0]], np.float32)
    (found,) = head_statistics(head[None, None], [0], [0], axes("..s", "..s"), alignment)
    assert found.alignment_agreement == 0.5  # row 0: column 0 in both; row 1: column 1 and column 0
    alignment[0] = 0  # not compared
    (found,) = head_statistics(head[None, None], [0], [0], axes("..s", "..s"), alignment)
    assert found.alignment_agreement == 0
