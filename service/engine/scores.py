"""Scores of the next token of each row, the result of a decoder step."""

import functools
from collections.abc import Mapping

import numpy as np

from sightline.service.runtime.runner import Array


class StepScores:
    """Scores of the next token for the rows of one step.

    Log-probabilities are those of the model, before temperature, penalties and filters.
    """

    def __init__(self, outputs: Mapping[str, Array], first: int = 0, num_skipping: int = 0) -> None:
        """Wrap `TOP_OUTPUTS` of a step, and `VOCABULARY_OUTPUTS` if a row needs them.

        `num_skipping` rows after those of the step may get a next token.
        """
        self._outputs = outputs
        self._first = first
        self._top_ids = outputs["top_ids"]  # (B, K), most probable first
        self._top_logprobs = outputs["top_logprobs"]  # (B, K)
        best_ids = self._top_ids[:, 0]
        # The most probable tokens unless changed, and 0 for rows that are not part of the step.
        self.next_ids = np.concatenate([best_ids, np.zeros(num_skipping, np.int64)])
        self._best_ids: list[int] = best_ids.tolist()
        self._best_logprobs: list[float] = self._top_logprobs[:, 0].tolist()

    def set_next_token(self, row: int, token_id: int) -> None:
        self.next_ids[row - self._first] = token_id

    def best(self, row: int) -> tuple[int, float]:
        """Return the most probable token of a row and its log-probability, which is not finite if
        the scores of the row are not finite.
        """
        return self._best_ids[row - self._first], self._best_logprobs[row - self._first]

    @functools.cached_property
    def _top(self) -> tuple[list[list[int]], list[list[float]]]:
        return self._top_ids.tolist(), self._top_logprobs.tolist()

    def top_of(self, row: int, count: int) -> tuple[list[int], list[float]]:
        """Return the top `count` token ids of one row, best first, and their log-probabilities."""
        ids, logprobs = self._top
        index = row - self._first
        return ids[index][:count], logprobs[index][:count]

    def logits(self, row: int) -> Array:
        """Return the logits (V,) of a row as a view that must not be modified."""
        logits: Array = self._outputs["logits"][row - self._first]
        return logits

    def logprobs(self, row: int) -> Array:
        """Return the log-probabilities (V,) of a row as a view that must not be modified."""
        logprobs: Array = self._outputs["logprobs"][row - self._first]
        return logprobs

    def alternatives(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """Return the top `count` tokens of a row as (id, log-probability), best first."""
        if not count:
            return ()
        return tuple(zip(*self.top_of(row, count), strict=True))
