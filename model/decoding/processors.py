"""Logits processors, which change the scores of the next token before a token is selected.

They follow Hugging Face transformers: greedy decoding applies them to raw logits, beam search to
log-probabilities. The biases and the penalties of presence and frequency are those of OpenAI's API.
One rule is added: if the processors forbid every token, the end token is allowed. This is a slow
reference implementation that processes one sequence at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]  # (V,)
EndIds = int | Sequence[int]  # one end token, or several


def as_tuple(end_ids: EndIds) -> tuple[int, ...]:
    return (end_ids,) if isinstance(end_ids, int) else tuple(end_ids)


@dataclass(frozen=True)
class LogitsProcessors:
    """Logits processors of one request, applied in the order of the fields, each off by default."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids and what is added to their scores
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    forced_end_at: int | None = None  # number of generated tokens of which the last must be the end token

    def __call__(self, scores: Scores, prompt: Sequence[int], generated: Sequence[int], end_ids: EndIds) -> Scores:
        """Return processed scores (V,) of the next token; forbidden tokens have -inf.

        Args:
            prompt: the start token and the forced prefix. Repetitions of prompt tokens count too.
            end_ids: the end token or end tokens. Only the first is forced.
        """
        read, changed, ends = [*prompt, *generated], scores.copy(), as_tuple(end_ids)
        for token_id, bias in self.logit_bias:
            changed[token_id] += np.float32(bias)
        seen = list(set(read))
        changed[seen] = penalised(changed[seen], self.repetition_penalty)
        for token_id in set(generated):
            penalty = self.presence_penalty + self.frequency_penalty * list(generated).count(token_id)
            changed[token_id] -= np.float32(penalty)
        changed[repeating_tokens(read, self.no_repeat_ngram_size)] = -np.inf
        if len(generated) < self.min_new_tokens:
            changed[list(ends)] = -np.inf
        changed[list(self.suppress_tokens)] = -np.inf
        if len(generated) + 1 == self.forced_end_at:
            changed[:] = -np.inf
        if changed.max() == -np.inf:
            changed[ends[0]] = 0.0
        return changed


NO_PROCESSORS = LogitsProcessors()


def penalised(scores: Scores, penalty: float) -> Scores:
    """Divide positive scores by the penalty and multiply negative scores by it.

    This is the repetition penalty of Keskar et al. 2019, section 4.1, with the change that Hugging
    Face transformers makes for negative scores.
    """
    return np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))


def repeating_tokens(read: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would complete an n-gram that has occurred before; none for size 0."""
    ngrams = [tuple(read[first : first + size]) for first in range(len(read) - size + 1)] if size else []
    last = tuple(read[len(read) - size + 1 :])  # the n - 1 tokens before the next one
    return [ngram[-1] for ngram in ngrams if ngram[:-1] == last]
