"""Metrics of rankings equal values by hand and slow versions."""

import math

import numpy as np
import pytest

from sightline.model.evaluation.ranking import (
    average_precision,
    metrics_of_scores,
    ndcg,
    rank_of_best,
    ranked,
    spearman,
)


def test_rankings_by_hand() -> None:
    scores, gains = [0.1, 0.9, 0.5], [1.0, 0.0, 0.5]
    assert ranked(scores, gains).tolist() == [0, 0.5, 1]
    assert ndcg(scores, gains) == pytest.approx((0.5 / math.log2(3) + 1 / 2) / (1 + 0.5 / math.log2(3)))
    assert ndcg([3, 1, 2], gains) == ndcg([3, 1, 2], [2.0, 0.0, 1.0]) == 1
    assert ndcg([1.0] * 12, [1.0] + [0.0] * 11) == 0  # the right one ranks after the tenth
    assert rank_of_best(scores, gains) == 3
    assert rank_of_best([1, 1], [1, 0]) == 2
    assert average_precision([4, 3, 2, 1], [1.0, 0.0, 1.0, 0.0]) == pytest.approx((1 + 2 / 3) / 2)


def slow_rank(values: list[int], value: int) -> float:
    return sum(other < value for other in values) + (1 + values.count(value)) / 2


def test_correlations_equal_slow_ones() -> None:
    draw = np.random.default_rng(1)
    first, second = (draw.integers(0, 9, 40).tolist() for _ in range(2))
    ranks = [[slow_rank(values, value) for value in values] for values in (first, second)]
    means = [sum(values) / 40 for values in ranks]
    covariance, *variances = (
        sum((a - means[i]) * (b - means[j]) for a, b in zip(ranks[i], ranks[j], strict=True))
        for i, j in ((0, 1), (0, 0), (1, 1))
    )
    assert spearman(first, second) == pytest.approx(covariance / math.sqrt(math.prod(variances)))
    assert spearman([1, 2, 3], [1, 4, 9]) == pytest.approx(1)
    assert spearman([1, 2, 3], [5, 5, 5]) == 0


def test_metrics_depend_on_the_scores() -> None:
    assert list(metrics_of_scores([0.1, 0.2, 0.3], [0, 1, 1])) == ["average precision", "Spearman"]
    assert list(metrics_of_scores([0.1, 0.2, 0.3], [0.0, 2.5, 5.0])) == ["Spearman"]
