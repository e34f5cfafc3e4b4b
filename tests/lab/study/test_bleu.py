import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from lab.study.bleu import (
    corpus_bleu,
    interval,
    mean_bleu,
    percent,
    resampled_bleu,
    resamples,
    statistics_of,
    with_interval,
)
from tests.support.tables import read_table

REFERENCES = [
    "ein mann schläft .",
    "zwei hunde rennen über eine wiese mit hohem gras .",
    "ein kind isst ein eis im park .",
    "drei frauen warten an der haltestelle auf den bus .",
    "ja .",
]
OUTPUTS = [
    "ein mann schläft .",
    "zwei hunde laufen über eine wiese mit gras .",
    "ein kind isst eis in einem park im sommer .",
    "frauen warten auf den bus an der haltestelle .",
    "nein",
]


def sacrebleus(indices: list[int]) -> float:
    metric = BLEU(tokenize="none", force=True)
    outputs, references = ([lines[index] for index in indices] for lines in (OUTPUTS, REFERENCES))
    score: float = metric.corpus_score(outputs, [references]).score
    return score


@pytest.mark.parametrize("indices", [[0, 1, 2, 3, 4], [1, 2], [4], [0], [3, 3, 1]])
def test_statistics_give_sacrebleus_score_of_any_sentences(indices: list[int]) -> None:
    rows = statistics_of(OUTPUTS, REFERENCES).rows
    assert corpus_bleu(rows[indices].sum(axis=0)) == sacrebleus(indices)


def test_a_resampled_score_is_the_score_of_the_drawn_sentences() -> None:
    rows = statistics_of(OUTPUTS, REFERENCES).rows
    samples = np.array([[1, 1, 1, 1, 1], [0, 1, 0, 2, 0]])
    assert resampled_bleu([rows], samples).tolist() == [sacrebleus([0, 1, 2, 3, 4]), sacrebleus([1, 3, 3])]


def test_several_outputs_have_the_mean_of_their_scores() -> None:
    rows = [statistics_of(outputs, REFERENCES).rows for outputs in (OUTPUTS, REFERENCES)]
    assert mean_bleu(rows) == pytest.approx((sacrebleus([0, 1, 2, 3, 4]) + 100) / 2)
    samples = resamples(len(REFERENCES))
    each = [resampled_bleu([one], samples) for one in rows]
    np.testing.assert_allclose(resampled_bleu(rows, samples), (each[0] + each[1]) / 2)


def test_samples_are_reproducible_and_differ_between_streams() -> None:
    assert (resamples(50) == resamples(50)).all()
    assert (resamples(50) != resamples(50, stream=1)).any()
    assert (resamples(50).sum(axis=1) == 50).all()


def test_the_interval_contains_the_score() -> None:
    rows = statistics_of(OUTPUTS * 20, REFERENCES * 20).rows
    low, high = interval(resampled_bleu([rows], resamples(len(rows))))
    assert low < mean_bleu([rows]) < high


@pytest.mark.parametrize(("value", "limits", "digits", "expected"), read_table(__file__))
def test_intervals_are_short_if_their_sides_are_alike(
    value: float, limits: tuple[float, float], digits: int, expected: str
) -> None:
    assert with_interval(value, limits, digits) == expected


def test_shares_are_in_percent() -> None:
    assert percent(0.541, (0.522, 0.562), digits=1) == "54.1 ± 2.1"
