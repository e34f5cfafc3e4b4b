"""Generations with one row: greedy decoding, sampling and scoring of a given target."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from numpy.typing import NDArray

from sightline.base.bundle import Manifest
from sightline.service.engine.generation import ActiveRequest, BeamCopies, Generation, NonFiniteError
from sightline.service.engine.hypothesis import Hypothesis
from sightline.service.engine.recorded_maps import Maps
from sightline.service.engine.request import GenerateRequest, Target
from sightline.service.engine.sampling import Sampler
from sightline.service.engine.scores import StepScores


class SingleGeneration(Generation):
    """Greedy decoding, sampling, or scoring of a target that is given as the prefix."""

    def __init__(
        self, active: ActiveRequest, request: GenerateRequest, manifest: Manifest, encoder_maps: Mapping[str, Maps]
    ) -> None:
        super().__init__(active, request, manifest, encoder_maps)
        parameters = request.parameters
        self._sampler = Sampler(parameters, request.sampling_seed) if parameters.do_sample else None
        self._needs_advance = bool(self._reads_logits or parameters.top_logprobs or request.stop or request.stream)

    def hypotheses(self) -> list[Hypothesis]:
        return [self._first]

    def take_best(self, token_id: int, logprob: float) -> bool:
        num_tokens = len(self._first.ids)
        if (
            self._needs_advance
            or token_id in self._suppressed_or_end
            or not len(self._prefix) <= num_tokens < self._max_tokens - 1
            or not isfinite(logprob)
            or self.map_error is not None
        ):
            return False
        self._first.append(token_id, logprob, ())
        return True

    def advance(self, scores: StepScores, beam_copies: BeamCopies) -> tuple[Target, ...]:
        row, hypothesis = self.rows[0], self._first
        best_id, best_logprob = scores.best(row)
        if not isfinite(best_logprob):
            raise NonFiniteError
        token_id, logprob = self._next_token(scores, row)
        if token_id != best_id:
            scores.set_next_token(row, token_id)
        self._append(hypothesis, scores, row, token_id, logprob)
        reason = self._reason_to_end(hypothesis)
        return () if reason is None else (self._target(hypothesis, reason),)

    def _next_token(self, scores: StepScores, row: int) -> tuple[int, float]:
        """Return the next token and its log-probability."""
        hypothesis = self._first
        if len(hypothesis.ids) < len(self._prefix):
            token_id = self._prefix[len(hypothesis.ids)]
        elif self._must_end(hypothesis):
            token_id = self._end_ids[0]
        elif self._reads_logits:
            token_id = self._pick(scores.logits(row))
        else:
            best, forbidden = scores.best(row), self._forbidden(hypothesis)
            if best[0] not in forbidden:
                return best
            return next(token for token in scores.alternatives(row, len(forbidden) + 1) if token[0] not in forbidden)
        return token_id, float(scores.logprobs(row)[token_id])

    def _pick(self, logits: NDArray[Any]) -> int:
        if self._processors or self._first.matcher is not None:
            logits = self._processed(self._first, logits)
        return int(logits.argmax()) if self._sampler is None else self._sampler.draw(logits)
