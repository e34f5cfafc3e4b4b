"""What one decoder step says of every row's next token."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

ALWAYS = frozenset({"top_ids", "top_logprobs"})  # the step's outputs that every row needs
WHOLE = frozenset({"logits", "logprobs"})  # those of the whole vocabulary, which few rows need


class StepScores:
    """The scores of rows 0 to B-1. Log-probabilities are the model's own: before temperature, penalties and filters."""

    def __init__(self, outputs: Mapping[str, Array]) -> None:
        """`outputs` are the step's: those of `ALWAYS`, and of `WHOLE` where some row reads them."""
        self.top_ids = outputs["top_ids"]  # (B, K), the likeliest first
        self.top_logprobs = outputs["top_logprobs"]  # (B, K)
        self._outputs = outputs
        self.next_ids = self.top_ids[:, 0].copy()  # (B,) what each row reads next: the best token unless overwritten
        self.best_ids: list[int] = self.next_ids.tolist()
        self.best_logprobs: list[float] = self.top_logprobs[:, 0].tolist()  # not finite where a row's scores are not

    def logits(self, row: int) -> Array:
        """Of every token, (V,); not to be changed."""
        logits: Array = self._outputs["logits"][row]
        return logits

    def logprobs(self, row: int) -> Array:
        """Of every token, (V,); not to be changed."""
        logprobs: Array = self._outputs["logprobs"][row]
        return logprobs

    def alternatives(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """The `count` likeliest tokens of a row with their log-probabilities, best first."""
        if not count:
            return ()
        return tuple(zip(self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist(), strict=True))
