import numpy as np
import pytest

from tests.support.reference_decoding import NO_PROCESSORS, LogitsProcessors, penalised, repeating_tokens
from tests.support.tables import read_table

END = 1
SCORES = np.array([-2.0, 0.5, 3.0, -1.0, 0.0, 2.0], np.float32)


def test_default_parameters_change_nothing() -> None:
    np.testing.assert_array_equal(NO_PROCESSORS(SCORES, [0], [2, 2, 2], END), SCORES)


def test_the_penalty_lowers_scores_of_either_sign() -> None:
    np.testing.assert_allclose(penalised(SCORES, 2.0), [-4.0, 0.25, 1.5, -2.0, 0.0, 1.0])


def test_each_token_of_prompt_and_output_is_penalised_once() -> None:
    given = LogitsProcessors(repetition_penalty=2.0)(SCORES, [0, 3], [2, 2], END)
    np.testing.assert_allclose(given, [-4.0, 0.5, 1.5, -2.0, 0.0, 2.0])
    np.testing.assert_array_equal(SCORES, [-2.0, 0.5, 3.0, -1.0, 0.0, 2.0])


@pytest.mark.parametrize(("read", "size", "expected"), read_table(__file__))
def test_a_repeated_ngram_is_forbidden(read: list[int], size: int, expected: list[int]) -> None:
    assert repeating_tokens(read, size) == expected


def test_the_prompt_counts_for_ngrams() -> None:
    given = LogitsProcessors(no_repeat_ngram_size=2)(SCORES, [0, 5], [0], END)
    assert np.flatnonzero(np.isinf(given)).tolist() == [5]


def test_the_end_token_waits_for_the_shortest_length_without_the_prompt() -> None:
    processors = LogitsProcessors(min_new_tokens=2)
    assert processors(SCORES, [0, 5, 5], [4], END)[END] == -np.inf
    assert processors(SCORES, [0], [4, 4], END)[END] == SCORES[END]


def test_biases_are_added_to_the_scores_before_the_repetition_penalty() -> None:
    given = LogitsProcessors(logit_bias=((2, 1.5), (5, -100.0)))(SCORES, [0], [], END)
    expected = SCORES.copy()
    expected[[2, 5]] += [1.5, -100.0]
    np.testing.assert_array_equal(given, expected)
    both = LogitsProcessors(logit_bias=((2, 4.0),), repetition_penalty=2.0)(SCORES, [2], [], END)
    assert both[2] == penalised(SCORES[[2]] + np.float32(4.0), 2.0)[0]


def test_penalties_of_presence_and_frequency_count_generated_tokens_without_the_prompt() -> None:
    given = LogitsProcessors(presence_penalty=0.5, frequency_penalty=0.25)(SCORES, [0, 4], [2, 5, 2], END)
    expected = SCORES.copy()
    expected[[2, 5]] -= [1.0, 0.75]
    np.testing.assert_array_equal(given, expected)


def test_suppressed_tokens_have_probability_zero() -> None:
    given = LogitsProcessors(suppress_tokens=(2, 5))(SCORES, [0], [], END)
    assert np.flatnonzero(np.isinf(given)).tolist() == [2, 5]


def test_the_end_token_is_allowed_if_nothing_else_is() -> None:
    given = LogitsProcessors(min_new_tokens=3, suppress_tokens=(0, 2, 3, 4, 5))(SCORES, [0], [], END)
    assert np.flatnonzero(np.isfinite(given)).tolist() == [END]
