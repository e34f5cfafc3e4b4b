"""Changes a row's scores before a token is picked, as Hugging Face's logits processors of the same names do."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from service.parameters import GenerateParameters

Scores = NDArray[Any]


class Processor(Protocol):
    """One of the changes."""

    def process(self, scores: Scores, read: Sequence[int], num_generated: int) -> None:
        """Change `scores` (V,) in place; `read` is all that the decoder has read, the start token first."""
        ...


class RepetitionPenalty:
    """Makes every token that was read less likely (Keskar et al. 2019, section 4.1)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def process(self, scores: Scores, read: Sequence[int], num_generated: int) -> None:
        ids = np.unique(read)
        penalised = scores[ids]
        scores[ids] = np.where(penalised < 0, penalised * self._penalty, penalised / self._penalty)


class NoRepeatNgram:
    """Forbids what would end an n-gram that was read before (Paulus et al. 2017, section 2.5)."""

    def __init__(self, size: int) -> None:
        self._size = size

    def process(self, scores: Scores, read: Sequence[int], num_generated: int) -> None:
        size = self._size
        last = list(read[len(read) - size + 1 :])
        starts = range(len(read) - size + 1)
        forbidden = [read[start + size - 1] for start in starts if list(read[start : start + size - 1]) == last]
        scores[forbidden] = -np.inf


class SuppressTokens:
    """Forbids some tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def process(self, scores: Scores, read: Sequence[int], num_generated: int) -> None:
        scores[self._ids] = -np.inf


class MinNewTokens:
    """Forbids the end token before so many tokens were generated."""

    def __init__(self, min_new_tokens: int, end_id: int) -> None:
        self._min_new_tokens = min_new_tokens
        self._end_id = end_id

    def process(self, scores: Scores, read: Sequence[int], num_generated: int) -> None:
        if num_generated < self._min_new_tokens:
            scores[self._end_id] = -np.inf


class EndWhereNothingIsLeft:
    """Allows the end token where every token was forbidden."""

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id

    def process(self, scores: Scores, read: Sequence[int], num_generated: int) -> None:
        if scores.max() == -np.inf:
            scores[self._end_id] = 0.0


def changes_other_tokens(processors: Sequence[Processor]) -> bool:
    """Whether more than the end token may become less, or more, likely."""
    return not all(isinstance(one, MinNewTokens | EndWhereNothingIsLeft) for one in processors)


def make_processors(parameters: GenerateParameters, end_id: int) -> list[Processor]:
    """The processors that a request asks for, in the order in which they act."""
    processors: list[Processor] = []
    if parameters.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(parameters.repetition_penalty))
    if parameters.no_repeat_ngram_size:
        processors.append(NoRepeatNgram(parameters.no_repeat_ngram_size))
    if parameters.min_new_tokens:
        processors.append(MinNewTokens(parameters.min_new_tokens, end_id))
    if parameters.suppress_tokens:
        processors.append(SuppressTokens(parameters.suppress_tokens))
    return [*processors, EndWhereNothingIsLeft(end_id)] if processors else []


def process(processors: Sequence[Processor], scores: Scores, read: Sequence[int], num_generated: int) -> None:
    for processor in processors:
        processor.process(scores, read, num_generated)
