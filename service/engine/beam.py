"""Beam search as a generation: one row a beam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest
from service.engine.attention import Maps
from service.engine.generation import Generation, Handle, Moves, NotFiniteError
from service.engine.hypothesis import Hypothesis
from service.engine.request import FinishReason, GenerateRequest, Target
from service.engine.sampling import best_places
from service.engine.scores import StepScores


@dataclass(frozen=True)
class Finished:
    """A hypothesis that has ended."""

    hypothesis: Hypothesis
    reason: FinishReason
    rank_score: float  # penalised by its length


Candidate = tuple[int, int, float]  # a beam, one more token, and the sum of processed log-probabilities with it


class BeamGeneration(Generation):
    """Beam search as `generate` of Hugging Face transformers (version 5) does it; see `model.decoding.reference.beam`.

    Every beam has a row. Before the first token of its own a generation has one beam, and its other rows read what the
    first reads. A beam whose parent stood in the same row stays there; only the others are moved.
    """

    def __init__(
        self, handle: Handle, request: GenerateRequest, manifest: Manifest, encoder_maps: Mapping[str, Maps]
    ) -> None:
        super().__init__(handle, request, manifest, encoder_maps)
        self._parameters = request.parameters
        self._open = [self._first]  # beam i is in self.rows[i]
        self._finished: list[Finished] = []  # the best so far, best first

    def hypotheses(self) -> list[Hypothesis]:
        return self._open

    @property
    def _num_growing(self) -> int:
        return max(0, self._parameters.num_return_sequences - len(self._finished))

    def advance(self, scores: StepScores, moves: Moves) -> tuple[Target, ...]:
        if not all(isfinite(scores.best(row)[1]) for row in self.rows[: len(self._open)]):
            raise NotFiniteError
        if len(self._first.ids) < len(self._prefix):
            self._read_prefix(scores)
            return ()
        branches: list[tuple[int, Hypothesis]] = []  # the next open beams, each with its parent's place
        for rank, candidate in enumerate(self._candidates(scores)):
            if len(branches) == self._parameters.num_beams:
                break
            hypothesis = self._extended(candidate, scores)
            reason = self._reason_to_end(hypothesis)
            if reason is None:
                branches.append((candidate[0], hypothesis))
            elif rank < self._parameters.num_beams:
                self._finish(hypothesis, reason)
        if self._is_over([hypothesis for _, hypothesis in branches]):
            return self._targets()
        self._place(branches, scores, moves)
        return ()

    def _read_prefix(self, scores: StepScores) -> None:
        first, token_id = self.rows[0], self._prefix[len(self._first.ids)]
        self._append(self._first, scores, first, token_id, float(scores.logprobs(first)[token_id]))
        for row in self.rows:
            scores.choose(row, token_id)

    def _candidates(self, scores: StepScores) -> list[Candidate]:
        """The 2 * num_beams best of all one-token extensions of the open beams, best first."""
        count = 2 * self._parameters.num_beams
        if self._reads_logits:
            ids, logprobs = self._best_of_all(scores, count)
        else:
            ids, logprobs = scores.top(self.rows[: len(self._open)], count + 1)
            if len(self._open[0].ids) < self._min_tokens:
                logprobs[ids == self._end_id] = -np.inf
        totals = logprobs + np.array([[hypothesis.rank_score] for hypothesis in self._open])  # (beams, tokens)
        best = np.argsort(-totals, axis=None, kind="stable")[:count]
        beams = best // totals.shape[1]
        sums = totals.ravel()[best]
        possible = int(np.count_nonzero(sums > -np.inf))  # they come first
        return list(zip(beams.tolist(), ids.ravel()[best].tolist(), sums.tolist(), strict=True))[:possible]

    def _best_of_all(self, scores: StepScores, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The `count` best tokens of each beam after the processors, with their scores, both (beams, count)."""
        processed = [
            self._processed(hypothesis, scores.logprobs(row))
            for row, hypothesis in zip(self.rows, self._open, strict=False)
        ]
        ids = np.stack([best_places(one, count) for one in processed])
        return ids, np.take_along_axis(np.stack(processed), ids, axis=1)

    def _extended(self, candidate: Candidate, scores: StepScores) -> Hypothesis:
        beam, token_id, total = candidate
        parent, row = self._open[beam], self.rows[beam]
        child = parent.branch(total)
        logprob = total - parent.rank_score
        if self._reads_logits:  # the processors have changed it
            logprob = float(scores.logprobs(row)[token_id])
        self._append(child, scores, row, token_id, logprob)
        return child

    def _finish(self, hypothesis: Hypothesis, reason: FinishReason) -> None:
        rank_score = self._penalised(hypothesis.rank_score, len(hypothesis.ids))
        self._finished.append(Finished(hypothesis, reason, rank_score))
        self._finished.sort(key=lambda one: -one.rank_score)
        del self._finished[self._parameters.num_beams :]

    def _penalised(self, score: float, num_tokens: int) -> float:
        return float(score / (num_tokens - len(self._prefix)) ** self._parameters.length_penalty)

    def _place(self, branches: list[tuple[int, Hypothesis]], scores: StepScores, moves: Moves) -> None:
        """Put the next open beams into rows, as many as can into their parents' own."""
        placed: dict[int, Hypothesis] = {}
        homeless = []
        for parent, hypothesis in branches:
            if parent in placed or parent >= len(branches):
                homeless.append((parent, hypothesis))
            else:
                placed[parent] = hypothesis
        free = (place for place in range(len(branches)) if place not in placed)
        for place, (parent, hypothesis) in zip(list(free), homeless, strict=True):
            placed[place] = hypothesis
            moves.append((self.rows[parent], self.rows[place]))
        self._open = [placed[place] for place in range(len(branches))]
        for row, hypothesis in zip(self.rows, self._open, strict=False):
            scores.choose(row, hypothesis.ids[-1])

    def _is_over(self, still_open: Sequence[Hypothesis]) -> bool:
        if not still_open:
            return True
        parameters = self._parameters
        if len(self._finished) < parameters.num_beams:
            return False
        if parameters.early_stopping is True:
            return True
        # A longer continuation could still come to beat this bound; the search ends all the same, as it does there.
        num_tokens = len(still_open[0].ids)
        if parameters.early_stopping == "never" and parameters.length_penalty > 0:
            num_tokens = self._max_tokens
        best = self._penalised(still_open[0].rank_score, num_tokens)
        return best <= self._finished[-1].rank_score

    def _targets(self) -> tuple[Target, ...]:
        return tuple(
            one.hypothesis.target(one.reason, len(self._prefix), self._parameters.length_penalty)
            for one in self._finished[: self._parameters.num_return_sequences]
        )
