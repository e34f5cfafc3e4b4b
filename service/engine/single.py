"""A generation in one row: the likeliest token, a draw, or a target that is given."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from numpy.typing import NDArray

from service.bundle import Manifest
from service.engine.attention import Maps
from service.engine.generation import Generation, Handle, Moves, NotFiniteError
from service.engine.hypothesis import Hypothesis
from service.engine.request import GenerateRequest, Target
from service.engine.sampling import Sampler
from service.engine.scores import StepScores


class SingleGeneration(Generation):
    """Greedy decoding or sampling."""

    def __init__(
        self, handle: Handle, request: GenerateRequest, manifest: Manifest, encoder_maps: Mapping[str, Maps]
    ) -> None:
        super().__init__(handle, request, manifest, encoder_maps)
        self._sampler = Sampler(request.parameters) if request.parameters.do_sample else None

    def hypotheses(self) -> list[Hypothesis]:
        return [self._first]

    def advance(self, scores: StepScores, moves: Moves) -> tuple[Target, ...]:
        row, written = self.rows[0], self._first
        if not isfinite(scores.best_logprobs[row]):
            raise NotFiniteError
        token_id, logprob = self._next_token(scores, row)
        if token_id != scores.best_ids[row]:
            scores.next_ids[row] = token_id
        self._append(written, scores, row, token_id, logprob)
        reason = self._reason_to_end(written)
        return () if reason is None else (written.target(reason, len(self._prefix), 0.0),)

    def _next_token(self, scores: StepScores, row: int) -> tuple[int, float]:
        """A token and its log-probability."""
        written = self._first
        if len(written.ids) < len(self._prefix):
            token_id = self._prefix[len(written.ids)]
        elif self._reads_logits:
            token_id = self._pick(scores.logits(row))
        else:
            must_go_on = len(written.ids) < self._min_tokens and scores.best_ids[row] == self._end_id
            if must_go_on:
                return int(scores.top_ids[row, 1]), float(scores.top_logprobs[row, 1])
            return scores.best_ids[row], scores.best_logprobs[row]
        return token_id, float(scores.logprobs(row)[token_id])

    def _pick(self, logits: NDArray[Any]) -> int:
        if self._processors:
            logits = self._processed(self._first, logits)
        return int(logits.argmax()) if self._sampler is None else self._sampler.draw(logits)
