"""Logits processors with the semantics of those in Hugging Face Transformers.

They change scores (V,), logits or log-probabilities, in place. `token_ids` are all decoder inputs
so far, from the start token or prompt on; the last `num_generated` of them are generated.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.service.parameters import GenerateParameters

Scores = NDArray[Any]


def add_biases(
    ids: Sequence[int], biases: Scores, scores: Scores, token_ids: Sequence[int], num_generated: int
) -> None:
    """Add a bias to the scores of some tokens."""
    scores[ids] += biases


def penalize_repetition(penalty: float, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
    """Penalize all tokens in the decoder's inputs (Keskar et al. 2019, CTRL, section 4.1)."""
    ids = np.unique(token_ids)
    penalised = scores[ids]
    scores[ids] = np.where(penalised < 0, penalised * penalty, penalised / penalty)


def penalize_occurrences(
    presence: float, frequency: float, scores: Scores, token_ids: Sequence[int], num_generated: int
) -> None:
    """Subtract penalties from the scores of generated tokens, as OpenAI's API does.

    The presence penalty counts once for each of these tokens, the frequency penalty each time.
    """
    ids, counts = np.unique(np.array(token_ids[len(token_ids) - num_generated :], np.int64), return_counts=True)
    scores[ids] -= (presence + frequency * counts).astype(np.float32)


def forbid_ngrams(size: int, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
    """Forbid tokens that would repeat an n-gram (Paulus et al. 2017, section 2.5)."""
    last = list(token_ids[len(token_ids) - size + 1 :])
    starts = range(len(token_ids) - size + 1)
    forbidden = [token_ids[start + size - 1] for start in starts if list(token_ids[start : start + size - 1]) == last]
    scores[forbidden] = -np.inf


def forbid_tokens(ids: Sequence[int], scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
    scores[ids] = -np.inf


def forbid_sequences(
    sequences: Sequence[tuple[int, ...]], scores: Scores, token_ids: Sequence[int], num_generated: int
) -> None:
    """Forbid the last token of sequences after the tokens before it."""
    for *before, last in sequences:
        if list(token_ids[-len(before) :]) == before:
            scores[last] = -np.inf


def forbid_early_end(
    least: int, end_ids: Sequence[int], scores: Scores, token_ids: Sequence[int], num_generated: int
) -> None:
    """Forbid the end tokens until `least` tokens are generated."""
    if num_generated < least:
        scores[end_ids] = -np.inf


def force_end(most: int, end_id: int, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
    """Allow only the end token as the last of `most` tokens."""
    if num_generated == most - 1:
        scores[:] = -np.inf
        scores[end_id] = 0.0


def allow_end_if_all_forbidden(end_id: int, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
    if scores.max() == -np.inf:
        scores[end_id] = 0.0


def changes_scores(parameters: GenerateParameters) -> bool:
    """Return True if the processors do more than forbid a fixed set of tokens."""
    return bool(
        parameters.logit_bias
        or parameters.repetition_penalty != 1.0
        or parameters.presence_penalty
        or parameters.frequency_penalty
        or parameters.no_repeat_ngram_size
    )


def make_processors(
    parameters: GenerateParameters,
    end_ids: Sequence[int],
    suppress_tokens: Collection[int] = (),
    forced_end_at: int | None = None,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> list[partial[None]]:
    """Return the processors of a request, in the order of their application.

    `suppress_tokens` are in addition to those of the request. `forced_end_at` is the number of
    generated tokens of which the last must be the first of `end_ids`.
    """
    processors: list[partial[None]] = []
    if parameters.logit_bias:
        ids, biases = map(list, zip(*parameters.logit_bias, strict=True))
        processors.append(partial(add_biases, ids, np.array(biases, np.float32)))
    if parameters.repetition_penalty != 1.0:
        processors.append(partial(penalize_repetition, parameters.repetition_penalty))
    if parameters.presence_penalty or parameters.frequency_penalty:
        processors.append(partial(penalize_occurrences, parameters.presence_penalty, parameters.frequency_penalty))
    if parameters.no_repeat_ngram_size:
        processors.append(partial(forbid_ngrams, parameters.no_repeat_ngram_size))
    if parameters.min_new_tokens:
        processors.append(partial(forbid_early_end, parameters.min_new_tokens, list(end_ids)))
    if suppressed := {*suppress_tokens, *parameters.suppress_tokens}:
        processors.append(partial(forbid_tokens, sorted(suppressed)))
    if bad_words:
        processors.append(partial(forbid_sequences, bad_words))
    if forced_end_at is not None:
        processors.append(partial(force_end, forced_end_at, end_ids[0]))
    return [*processors, partial(allow_end_if_all_forbidden, end_ids[0])] if processors else []


def process(processors: Sequence[partial[None]], scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
    for processor in processors:
        processor(scores, token_ids, num_generated)
