import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sightline.service.engine import processors as functions
from sightline.service.engine.processors import changes_scores, make_processors, process
from sightline.service.parameters import GenerateParameters
from tests.support.tables import read_table

START, END = 1, 2
SCORES = [-2.0, 0.5, 3.0, -1.0, 0.0, 2.0]


def changed(
    processor: partial[None], scores: Sequence[float], read: Sequence[int], num_generated: int = 0
) -> list[float]:
    array = np.array(scores, np.float32)
    processor(array, read, num_generated)
    given: list[float] = array.tolist()
    return given


def forbidden(processor: partial[None], read: Sequence[int], num_generated: int = 0) -> list[int]:
    after = changed(processor, SCORES, read, num_generated)
    kept = [before for before, left in zip(SCORES, after, strict=True) if left != -math.inf]
    assert kept == [left for left in after if left != -math.inf], "what is not forbidden stays as it was"
    return [token for token, left in enumerate(after) if left == -math.inf]


def test_biases_are_added_to_the_scores_of_their_tokens() -> None:
    biases = partial(functions.add_biases, [2, 0], np.array([-100.0, 1.5], np.float32))
    assert changed(biases, SCORES, [0]) == [-0.5, 0.5, -97.0, -1.0, 0.0, 2.0]


def test_a_repetition_is_penalised_once_for_scores_of_either_sign() -> None:
    given = changed(partial(functions.penalize_repetition, 2.0), SCORES, [0, 2, 2, 2, 4])
    assert given == [-4.0, 0.5, 1.5, -1.0, 0.0, 2.0]


def test_a_penalty_below_one_favours_repetitions() -> None:
    assert changed(partial(functions.penalize_repetition, 0.5), SCORES, [0, 2]) == [-1.0, 0.5, 6.0, -1.0, 0.0, 2.0]


def test_a_forbidden_token_stays_forbidden_when_it_is_penalised() -> None:
    assert changed(partial(functions.penalize_repetition, 2.0), [-math.inf, 1.0], [0]) == [-math.inf, 1.0]


@pytest.mark.parametrize(("read", "size", "expected"), read_table(__file__))
def test_an_ngram_is_not_repeated(read: list[int], size: int, expected: list[int]) -> None:
    assert forbidden(partial(functions.forbid_ngrams, size), read) == expected


def test_suppressed_tokens_are_always_forbidden() -> None:
    for num_generated in (0, 7):
        assert forbidden(partial(functions.forbid_tokens, [5, 2]), [START], num_generated) == [2, 5]


@pytest.mark.parametrize("read", [[4], [1], [4, 4], [5, 1], [5, 1, 4], [0, 5, 1, 4], [4, 1, 5, 1]])
def test_bad_words_are_those_of_transformers(read: list[int]) -> None:
    import torch
    from transformers import NoBadWordsLogitsProcessor

    words = [(4, 3), (1, 4, 5), (1, 4, 0), (4, 4)]
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], [END])
    expected = processor(torch.tensor([read]), torch.tensor([SCORES]))[0].tolist()
    assert changed(partial(functions.forbid_sequences, words), SCORES, read) == expected


def test_the_end_token_is_forbidden_before_the_minimum_length() -> None:
    processor = partial(functions.forbid_early_end, 3, [END])
    assert [forbidden(processor, [START, 4, 4], position) for position in range(5)] == [[END], [END], [END], [], []]


def test_every_end_token_is_forbidden_before_the_minimum_length() -> None:
    processor = partial(functions.forbid_early_end, 2, [END, 4])
    assert [forbidden(processor, [START], position) for position in (1, 2)] == [[END, 4], []]


def test_the_last_token_can_be_forced_to_be_the_end() -> None:
    forced = [0.0 if token == END else -math.inf for token in range(len(SCORES))]
    processor = partial(functions.force_end, 3, END)
    assert [changed(processor, SCORES, [START], position) for position in range(4)] == [
        SCORES,
        SCORES,
        forced,
        SCORES,
    ]
    (first, *_, last) = make_processors(GenerateParameters(suppress_tokens=(4,)), (END, 5), (3,), 2)
    assert forbidden(first, [START]) == [3, 4]
    processors = make_processors(GenerateParameters(suppress_tokens=(END,)), (END, 5), (), 2)
    scores = np.array(SCORES, np.float32)
    process(processors, scores, [START], 1)
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [END]
    assert last.func is functions.allow_end_if_all_forbidden


def test_the_end_token_is_allowed_if_all_tokens_are_forbidden() -> None:
    nothing, allow = [-math.inf] * 6, partial(functions.allow_end_if_all_forbidden, END)
    assert changed(allow, nothing, [START]) == [*nothing[:END], 0.0, *nothing[END + 1 :]]
    almost_nothing = [*nothing[:5], -1e30]
    assert changed(allow, almost_nothing, [START]) == pytest.approx(almost_nothing)


def test_a_request_without_options_has_no_processors() -> None:
    assert make_processors(GenerateParameters(num_beams=4, top_k=3, top_logprobs=5), [END]) == []


def test_processors_that_forbid_tokens_run_before_the_end_token_is_allowed() -> None:
    parameters = GenerateParameters(
        logit_bias=((1, 2.0),),
        repetition_penalty=1.5,
        presence_penalty=0.5,
        no_repeat_ngram_size=2,
        min_new_tokens=9,
        suppress_tokens=(0, 1, 3, 4, 5),
    )
    processors = make_processors(parameters, [END])
    assert [processor.func for processor in processors] == [
        functions.add_biases,
        functions.penalize_repetition,
        functions.penalize_occurrences,
        functions.forbid_ngrams,
        functions.forbid_early_end,
        functions.forbid_tokens,
        functions.allow_end_if_all_forbidden,
    ]
    scores = np.array(SCORES, np.float32)
    process(processors, scores, [START], 0)
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [END]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (GenerateParameters(), False),
        (GenerateParameters(min_new_tokens=4), False),
        (GenerateParameters(repetition_penalty=1.1), True),
        (GenerateParameters(repetition_penalty=0.9), True),
        (GenerateParameters(presence_penalty=-1.0), True),
        (GenerateParameters(frequency_penalty=0.5), True),
        (GenerateParameters(no_repeat_ngram_size=3), True),
        (GenerateParameters(logit_bias=((3, 1.0),)), True),
        (GenerateParameters(suppress_tokens=(0,)), False),
    ],
)
def test_only_biases_penalties_and_ngrams_change_more_than_a_fixed_set_of_tokens(
    parameters: GenerateParameters, expected: bool
) -> None:
    assert changes_scores(parameters) is expected


TOKENS = st.integers(0, 6)


@given(
    scores=st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7),
    read=st.lists(TOKENS, min_size=1, max_size=20),
    num_generated=st.integers(0, 12),
    parameters=st.builds(
        GenerateParameters,
        logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32)).map(lambda biases: tuple(biases.items())),
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.3, 4.0]),
        presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.75]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 2.0]),
        no_repeat_ngram_size=st.integers(0, 4),
        min_new_tokens=st.integers(0, 12),
        suppress_tokens=st.lists(TOKENS, max_size=7).map(tuple),
    ),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_all_processors_together_equal_the_reference(
    scores: list[float], read: list[int], num_generated: int, parameters: GenerateParameters
) -> None:
    from tests.support.reference_decoding import processors_of

    array: NDArray[np.float32] = np.array(scores, np.float32)
    start = max(0, len(read) - num_generated)
    expected = processors_of(parameters)(array, read[:start], read[start:], END)
    process(make_processors(parameters, [END]), array, read, len(read) - start)
    # Sums of numbers up to 480 are rounded to float32, also where they nearly cancel out.
    np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-4)
