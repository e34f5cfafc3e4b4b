"""Cases of omitted and made-up words, and the measure of scores that find them."""

import numpy as np
import pytest

from lab.study.coverage import auroc, row_of
from lab.study.planting import Case, deleted, inserted, joined, judged, left_out, made_up, negated
from sightline.export.check.coverage import Material
from sightline.export.check.coverage import auroc as plain_auroc

PAIR = "A small dog is running.", "Ein kleiner Hund rennt."
LINKS = frozenset({(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4)})


def errors(case: Case, text: str) -> list[str]:
    return [text[slice(*span)] for span in case.errors]


def test_words_are_inserted_into_the_source_or_the_target() -> None:
    material, rng = Material([PAIR[0], "Two women buy red apples."]), np.random.default_rng(0)
    cases = [*inserted(7, PAIR, LINKS, material, rng), *negated(7, PAIR, LINKS)]
    assert len(cases) > 2 and errors(cases[-1], cases[-1].source) == ["not"]
    for case in cases:
        ((start, end),) = case.errors
        assert case.source[:start] + case.source[end + 1 :] == PAIR[0]
        assert (case.group, case.target) == (7, PAIR[1])
        assert not case.unknown
    (case, *_) = made_up(7, PAIR, Material([PAIR[1], "Zwei Frauen kaufen rote Äpfel."]), rng)
    assert case.source == PAIR[0] and set(errors(case, case.target)) <= {"Frauen", "kaufen", "rote", "Äpfel"}


def test_words_are_deleted_from_the_target_with_all_that_they_stand_for() -> None:
    generators = map(np.random.default_rng, range(20))
    cases = [case for generator in generators for case in deleted(0, PAIR, LINKS, generator)]
    found = {case.target: errors(case, case.source) for case in cases}
    assert found["Ein kleiner rennt."] == ["dog"] and found["Ein Hund rennt."] == ["small"]
    assert found["Ein kleiner."] == ["dog", "is", "running"]
    assert ["is"] not in found.values()  # "rennt" stands for "running" too


def test_one_of_several_sentences_is_left_out() -> None:
    pairs, links = (
        [("A dog.", "Ein Hund."), ("Two cats.", "Zwei Katzen.")],
        [frozenset({(1, 1)}), frozenset({(0, 0), (1, 1)})],
    )
    case = left_out(1, pairs, links)
    assert (case.source, case.target) == ("A dog. Two cats.", "Ein Hund.")
    assert errors(case, case.source) == ["Two cats."]
    assert [case.source[slice(*span)] for span in case.unknown] == ["A", ".", ".", ".", "."]  # repeated words, too
    case = joined(1, pairs, links, "Zwei schwarze Tiere.", frozenset({(3, 0)}))
    assert errors(case, case.source) == ["dog", "cats"]
    case = joined(1, pairs, links, "Zwei schwarze Tiere.", frozenset({(3, 0), (4, 2)}))
    assert errors(case, case.source) == ["dog"]  # the two signs of "cats" differ


def test_known_words_without_a_link_are_omitted() -> None:
    case = judged(0, PAIR, LINKS - {(2, 2)}, known=frozenset({(0, 0), (2, 2)}))
    scored = {start: float(start) for start in (0, 2, 8, 12, 15)}
    words = [{"text": "x", "start": start, "coverage": score, "omitted": score > 4} for start, score in scored.items()]
    row = row_of("some", [case], [{"coverage": {"source_words": words}}])
    assert (row["words"], row["errors"], row["recall"], row["precision"]) == (2, 1, 1, 1)
    assert row["auroc"][0] == 0  # the omitted word has the larger score


def test_the_auroc_and_its_interval_count_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    flags, groups = rng.random(200) < 0.3, rng.integers(20, size=200)
    scores = np.round(rng.random(200) + 0.3 * ~flags, 1)
    value, low, high = auroc(scores, flags, groups)
    assert value == pytest.approx(plain_auroc(scores.astype(np.float32), flags), abs=1e-4)
    assert low < value < high
    assert auroc(scores, np.zeros(200, np.bool_), groups) == []
