"""Logits processors, which change the scores of the next token before one is picked, as in Hugging Face transformers.

Slow and obvious, one row at a time. Greedy decoding gives them raw logits, beam search log-probabilities, as there.
One rule is added: where every token is forbidden, the end token is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]  # (V,)


@dataclass(frozen=True)
class Processors:
    """Those of one request, applied in the order of the fields; each is off as it stands here."""

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()

    def __call__(self, scores: Scores, prompt: Sequence[int], generated: Sequence[int], end_id: int) -> Scores:
        """The changed scores; a token that may not follow has -inf.

        Args:
            scores: of each token of the vocabulary, to follow what was read.
            prompt: the start token and the forced prefix. Repetitions of it count too.
            generated: what was read after the prompt.
            end_id: the end token.
        """
        read, changed = [*prompt, *generated], scores.copy()
        seen = list(set(read))
        changed[seen] = penalised(changed[seen], self.repetition_penalty)
        changed[repeating_tokens(read, self.no_repeat_ngram_size)] = -np.inf
        if len(generated) < self.min_new_tokens:
            changed[end_id] = -np.inf
        changed[list(self.suppress_tokens)] = -np.inf
        if changed.max() == -np.inf:
            changed[end_id] = 0.0
        return changed


UNPROCESSED = Processors()


def penalised(scores: Scores, penalty: float) -> Scores:
    """Positive scores over the penalty, negative ones times it (Keskar et al. 2019, section 4.1, as amended there)."""
    return np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))


def repeating_tokens(read: Sequence[int], size: int) -> list[int]:
    """Tokens that would repeat an n-gram of what was read; none for size 0."""
    ngrams = [tuple(read[first : first + size]) for first in range(len(read) - size + 1)] if size else []
    last = tuple(read[len(read) - size + 1 :])  # the n - 1 tokens that the next one would complete
    return [ngram[-1] for ngram in ngrams if ngram[:-1] == last]
