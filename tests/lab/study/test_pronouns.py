import numpy as np
import pytest

from lab.study.pronouns import PRONOUN, read_pairs, summary


def test_sentences_of_a_pair_differ_in_one_word_and_have_one_pronoun() -> None:
    pairs = read_pairs()
    assert len({pair.sentences for pair in pairs}) == len(pairs) == 40
    for pair in pairs:
        words = [sentence.rstrip(".").split() for sentence in pair.sentences]
        assert [one != other for one, other in zip(*words, strict=True)].count(True) == 1
        for one in words:
            assert [one.count(word) for word in (PRONOUN, *pair.nouns)] == [1, 1, 1]
            assert one.index(pair.nouns[0]) < one.index(pair.nouns[1]) < one.index(PRONOUN)


def test_a_head_that_finds_the_noun_is_chosen_and_one_that_prefers_the_nearest_is_half_right() -> None:
    right, nearest = [0.5, -0.5], [-0.5, -0.5]
    # One layer with two heads, their mean, and a rollout that always prefers the nearest noun.
    columns = np.array([nearest, right, [0.0, -0.5], [-0.1, -0.5]]).T  # (2, 4)
    rows = summary("toy", np.tile(columns, (6, 1, 1)).reshape(6, 2, 1, 4))
    found = {row["heads"]: row for row in rows}
    for name in ("best head, chosen on the other half", "best head, chosen on the same pairs"):
        assert [found[name][one]["value"] for one in ("correct", "both", "moved")] == [1, 1, 1]
    assert [found["rollout"][one]["value"] for one in ("correct", "both", "moved")] == [0.5, 0, 1]
    assert found[None]["moved"] == [[0, 6, 6, 6]]


def test_a_difference_of_rounding_is_no_move() -> None:
    differences = np.zeros((4, 2, 1, 3))
    differences[:, 0] = 1e-6
    assert summary("toy", differences)[-1]["moved"] == [[0, 0, 0]]


def test_a_head_is_not_judged_on_the_pairs_that_chose_it() -> None:
    """Each head is right on one half only, so that the head chosen on the other half is wrong."""
    differences = np.zeros((8, 2, 1, 4))
    differences[0::2, 0, 0, 0] = 1
    differences[1::2, 0, 0, 1] = 1
    found = {row["heads"]: row for row in summary("toy", differences) if row["heads"]}
    assert found["best head, chosen on the other half"]["moved"]["value"] == 0
    assert found["best head, chosen on the same pairs"]["moved"]["value"] == pytest.approx(0.5)
