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
        self._sampler = Sampler(request.parameters, request.sampling_seed) if request.parameters.do_sample else None

    def hypotheses(self) -> list[Hypothesis]:
        return [self._first]

    def advance(self, scores: StepScores, moves: Moves) -> tuple[Target, ...]:
        row, written = self.rows[0], self._first
        best_id, best_logprob = scores.best(row)
        if not isfinite(best_logprob):
            raise NotFiniteError
        token_id, logprob = self._next_token(scores, row)
        if token_id != best_id:
            scores.choose(row, token_id)
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
            best = scores.best(row)
            must_go_on = len(written.ids) < self._min_tokens and best[0] == self._end_id
            return scores.alternatives(row, 2)[1] if must_go_on else best
        return token_id, float(scores.logprobs(row)[token_id])

    def _pick(self, logits: NDArray[Any]) -> int:
        if self._processors:
            logits = self._processed(self._first, logits)
        return int(logits.argmax()) if self._sampler is None else self._sampler.draw(logits)
