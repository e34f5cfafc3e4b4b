"""Beam search: a generation with one row of the batch for each beam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest
from service.engine.attention import Maps
from service.engine.generation import ActiveRequest, BeamCopies, Generation, NonFiniteError
from service.engine.hypothesis import Hypothesis
from service.engine.request import FinishReason, GenerateRequest, Target
from service.engine.sampling import best_indices
from service.engine.scores import StepScores


@dataclass(frozen=True)
class Finished:
    """A finished hypothesis."""

    hypothesis: Hypothesis
    reason: FinishReason
    rank_score: float  # with length penalty


# Index of a beam, id of the next token, and sum of the processed log-probabilities with that token.
Candidate = tuple[int, int, float]


class BeamGeneration(Generation):
    """Beam search with the results of `generate` in Hugging Face Transformers (version 5).

    `model.decoding.reference.beam` is the reference. Each beam has one row. Until the first new
    token there is only one beam, and the other rows repeat its inputs. A new beam takes the row of
    its parent if that row is free, so that only the other beams need a copy of decoder state.
    """

    def __init__(
        self, active: ActiveRequest, request: GenerateRequest, manifest: Manifest, encoder_maps: Mapping[str, Maps]
    ) -> None:
        self._parameters = request.parameters
        super().__init__(active, request, manifest, encoder_maps)
        self._open = [self._first]  # beam i has row self.rows[i]
        self._finished: list[Finished] = []  # the best finished hypotheses so far, best first

    def hypotheses(self) -> list[Hypothesis]:
        return self._open

    @property
    def _num_growing(self) -> int:
        return max(0, self._parameters.num_return_sequences - len(self._finished))

    def advance(self, scores: StepScores, beam_copies: BeamCopies) -> tuple[Target, ...]:
        if not all(isfinite(scores.best(row)[1]) for row in self.rows[: len(self._open)]):
            raise NonFiniteError
        if len(self._first.ids) < len(self._prefix):
            self._read_prefix(scores)
            return ()
        children: list[tuple[int, Hypothesis]] = []  # the next open beams with their parents' indices
        for rank, candidate in enumerate(self._candidates(scores)):
            if len(children) == self._parameters.num_beams:
                break
            hypothesis = self._extended(candidate, scores)
            reason = self._reason_to_end(hypothesis)
            if reason is None:
                children.append((candidate[0], hypothesis))
            elif rank < self._parameters.num_beams:
                self._finish(hypothesis, reason)
        if self._is_over([hypothesis for _, hypothesis in children]):
            return self._targets()
        self._assign_rows(children, scores, beam_copies)
        return ()

    def _read_prefix(self, scores: StepScores) -> None:
        first, token_id = self.rows[0], self._prefix[len(self._first.ids)]
        self._append(self._first, scores, first, token_id, float(scores.logprobs(first)[token_id]))
        for row in self.rows:
            scores.set_next_token(row, token_id)

    @property
    def _num_candidates(self) -> int:
        """Number of extensions: enough that `num_beams` of them do not end, if possible."""
        return max(2, 1 + len(self._end_ids)) * self._parameters.num_beams

    @property
    def _is_processed(self) -> bool:
        """True if the next tokens are chosen by scores after the logits processors."""
        return self._reads_logits or self._must_end(self._open[0])

    def _candidates(self, scores: StepScores) -> list[Candidate]:
        """Return the best one-token extensions of the open beams, best first."""
        count = self._num_candidates
        if self._is_processed:
            ids, logprobs = self._best_of_all(scores, count)
        else:
            forbidden = self._forbidden(self._open[0])
            ids, logprobs = scores.top(self.rows[: len(self._open)], count + len(forbidden))
            if forbidden:
                logprobs[np.isin(ids, list(forbidden))] = -np.inf
        totals = logprobs + np.array([[hypothesis.rank_score] for hypothesis in self._open])  # (beams, tokens)
        best = np.argsort(-totals, axis=None, kind="stable")[:count]
        beams = best // totals.shape[1]
        sums = totals.ravel()[best]
        possible = int(np.count_nonzero(sums > -np.inf))  # forbidden tokens come last
        return list(zip(beams.tolist(), ids.ravel()[best].tolist(), sums.tolist(), strict=True))[:possible]

    def _best_of_all(self, scores: StepScores, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the `count` best tokens of each beam after the processors, and their scores.

        Both arrays have the shape (beams, count).
        """
        processed = [
            self._processed(hypothesis, scores.logprobs(row))
            for row, hypothesis in zip(self.rows, self._open, strict=False)
        ]
        ids = np.stack([best_indices(one, count) for one in processed])
        return ids, np.take_along_axis(np.stack(processed), ids, axis=1)

    def _extended(self, candidate: Candidate, scores: StepScores) -> Hypothesis:
        beam, token_id, total = candidate
        parent, row = self._open[beam], self.rows[beam]
        child = parent.fork(total)
        logprob = total - parent.rank_score
        if self._is_processed:  # `total` has the processed log-probability
            logprob = float(scores.logprobs(row)[token_id])
        self._append(child, scores, row, token_id, logprob)
        return child

    def _finish(self, hypothesis: Hypothesis, reason: FinishReason) -> None:
        rank_score = self._penalised(hypothesis.rank_score, len(hypothesis.ids))
        self._finished.append(Finished(hypothesis, reason, rank_score))
        self._finished.sort(key=lambda one: -one.rank_score)
        del self._finished[self._parameters.num_beams :]

    def _penalised(self, score: float, num_tokens: int) -> float:
        num_counted = self._num_forced + num_tokens - len(self._prefix)
        return float(score / num_counted**self._parameters.length_penalty)

    def _assign_rows(self, children: list[tuple[int, Hypothesis]], scores: StepScores, beam_copies: BeamCopies) -> None:
        """Assign rows to the next open beams: the row of the parent where possible."""
        assigned: dict[int, Hypothesis] = {}
        unassigned = []
        for parent, hypothesis in children:
            if parent in assigned or parent >= len(children):
                unassigned.append((parent, hypothesis))
            else:
                assigned[parent] = hypothesis
        free = (index for index in range(len(children)) if index not in assigned)
        for index, (parent, hypothesis) in zip(list(free), unassigned, strict=True):
            assigned[index] = hypothesis
            beam_copies.append((self.rows[parent], self.rows[index]))
        self._open = [assigned[index] for index in range(len(children))]
        for row, hypothesis in zip(self.rows, self._open, strict=False):
            scores.set_next_token(row, hypothesis.ids[-1])

    def _is_over(self, still_open: Sequence[Hypothesis]) -> bool:
        if not still_open:
            return True
        parameters = self._parameters
        if len(self._finished) < parameters.num_beams:
            return False
        if parameters.early_stopping is True:
            return True
        # As in Transformers, the search ends even though a longer continuation could still exceed
        # this bound.
        num_tokens = len(still_open[0].ids)
        if parameters.early_stopping == "never" and parameters.length_penalty > 0:
            num_tokens = self._max_tokens
        best = self._penalised(still_open[0].rank_score, num_tokens)
        return best <= self._finished[-1].rank_score

    def _targets(self) -> tuple[Target, ...]:
        return tuple(
            one.hypothesis.target(one.reason, len(self._prefix), self._parameters.length_penalty, self._num_forced)
            for one in self._finished[: self._parameters.num_return_sequences]
        )
