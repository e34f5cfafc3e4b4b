"""What one decoder step says of every row's next token."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

ALWAYS = frozenset({"top_ids", "top_logprobs"})  # the step's outputs that every row needs
WHOLE = frozenset({"logits", "logprobs"})  # those of the whole vocabulary, which few rows need


class StepScores:
    """The scores of some rows. Log-probabilities are the model's own: before temperature, penalties and filters."""

    def __init__(self, outputs: Mapping[str, Array], first: int = 0) -> None:
        """Take the results of a step.

        Args:
            outputs: the step's: those of `ALWAYS`, and those of `WHOLE` where some row reads them.
            first: the row that their first row belongs to.
        """
        self._outputs = outputs
        self._first = first
        self._top_ids = outputs["top_ids"]  # (B, K), the likeliest first
        self._top_logprobs = outputs["top_logprobs"]  # (B, K)
        self.next_ids = self._top_ids[:, 0].copy()  # (B,) what each row reads next: its best token unless chosen
        self._best_ids: list[int] = self.next_ids.tolist()
        self._best_logprobs: list[float] = self._top_logprobs[:, 0].tolist()

    def choose(self, row: int, token_id: int) -> None:
        """Set the token that a row reads next."""
        self.next_ids[row - self._first] = token_id

    def best(self, row: int) -> tuple[int, float]:
        """Return a row's likeliest token and its log-probability, which is not finite if the row's scores are not."""
        return self._best_ids[row - self._first], self._best_logprobs[row - self._first]

    def top(self, rows: Sequence[int], count: int) -> tuple[Array, Array]:
        """Return copies of the `count` likeliest tokens of each row and of their log-probabilities, best first."""
        places = [row - self._first for row in rows]
        return self._top_ids[places, :count], self._top_logprobs[places, :count]

    def logits(self, row: int) -> Array:
        """Of every token, (V,); not to be changed."""
        logits: Array = self._outputs["logits"][row - self._first]
        return logits

    def logprobs(self, row: int) -> Array:
        """Of every token, (V,); not to be changed."""
        logprobs: Array = self._outputs["logprobs"][row - self._first]
        return logprobs

    def alternatives(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """The `count` likeliest tokens of a row with their log-probabilities, best first."""
        if not count:
            return ()
        ids, logprobs = self.top([row], count)
        return tuple(zip(ids[0].tolist(), logprobs[0].tolist(), strict=True))
