"""Logits processors with the semantics of those in Hugging Face Transformers."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sightline.service.parameters import GenerateParameters

Scores = NDArray[Any]


class Processor(Protocol):
    """Changes the scores of a row before the next token is chosen."""

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        """Change scores (V,), logits or log-probabilities, in place.

        `token_ids` are all decoder inputs so far, from the start token or prompt on.
        """
        ...


class LogitBias:
    """Adds a bias to the scores of some tokens."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._ids = [token_id for token_id, _ in biases]
        self._biases = np.array([bias for _, bias in biases], np.float32)

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        scores[self._ids] += self._biases


class RepetitionPenalty:
    """Penalizes all tokens in the decoder's inputs (Keskar et al. 2019, CTRL, section 4.1)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        ids = np.unique(token_ids)
        penalised = scores[ids]
        scores[ids] = np.where(penalised < 0, penalised * self._penalty, penalised / self._penalty)


class OccurrencePenalties:
    """Subtracts penalties from the scores of generated tokens, as OpenAI's API does.

    The presence penalty counts once for each of these tokens, the frequency penalty each time.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        ids, counts = np.unique(np.array(token_ids[len(token_ids) - num_generated :], np.int64), return_counts=True)
        scores[ids] -= (self._presence + self._frequency * counts).astype(np.float32)


class NoRepeatNgram:
    """Forbids tokens that would repeat an n-gram (Paulus et al. 2017, section 2.5)."""

    def __init__(self, size: int) -> None:
        self._size = size

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        size = self._size
        last = list(token_ids[len(token_ids) - size + 1 :])
        starts = range(len(token_ids) - size + 1)
        forbidden = [
            token_ids[start + size - 1] for start in starts if list(token_ids[start : start + size - 1]) == last
        ]
        scores[forbidden] = -np.inf


class SuppressTokens:
    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        scores[self._ids] = -np.inf


class BadWords:
    """Forbids the last token of sequences after the tokens before it."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._sequences = [(list(before), last) for *before, last in sequences]

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        for before, last in self._sequences:
            if list(token_ids[-len(before) :]) == before:
                scores[last] = -np.inf


class MinNewTokens:
    """Forbids the end tokens until `min_new_tokens` tokens are generated."""

    def __init__(self, min_new_tokens: int, end_ids: Sequence[int]) -> None:
        self._min_new_tokens = min_new_tokens
        self._end_ids = list(end_ids)

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        if num_generated < self._min_new_tokens:
            scores[self._end_ids] = -np.inf


class ForceEnd:
    """Allows only the end token as the last of `max_new_tokens` tokens."""

    def __init__(self, max_new_tokens: int, end_id: int) -> None:
        self._max_new_tokens = max_new_tokens
        self._end_id = end_id

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        if num_generated == self._max_new_tokens - 1:
            scores[:] = -np.inf
            scores[self._end_id] = 0.0


class AllowEndIfAllForbidden:
    """Allows one end token if all tokens are forbidden."""

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id

    def process(self, scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
        if scores.max() == -np.inf:
            scores[self._end_id] = 0.0


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
) -> list[Processor]:
    """Return the processors of a request, in the order of their application.

    `suppress_tokens` are in addition to those of the request. `forced_end_at` is the number of
    generated tokens of which the last must be the first of `end_ids`.
    """
    processors: list[Processor] = []
    if parameters.logit_bias:
        processors.append(LogitBias(parameters.logit_bias))
    if parameters.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(parameters.repetition_penalty))
    if parameters.presence_penalty or parameters.frequency_penalty:
        processors.append(OccurrencePenalties(parameters.presence_penalty, parameters.frequency_penalty))
    if parameters.no_repeat_ngram_size:
        processors.append(NoRepeatNgram(parameters.no_repeat_ngram_size))
    if parameters.min_new_tokens:
        processors.append(MinNewTokens(parameters.min_new_tokens, end_ids))
    if suppressed := {*suppress_tokens, *parameters.suppress_tokens}:
        processors.append(SuppressTokens(sorted(suppressed)))
    if bad_words:
        processors.append(BadWords(bad_words))
    if forced_end_at is not None:
        processors.append(ForceEnd(forced_end_at, end_ids[0]))
    return [*processors, AllowEndIfAllForbidden(end_ids[0])] if processors else []


def process(processors: Sequence[Processor], scores: Scores, token_ids: Sequence[int], num_generated: int) -> None:
    for processor in processors:
        processor.process(scores, token_ids, num_generated)
