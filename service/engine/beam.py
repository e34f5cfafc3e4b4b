"""Beam search: a generation with one row of the batch for each beam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import Manifest
from sightline.service.engine.generation import ActiveRequest, BeamCopies, Generation, NonFiniteError
from sightline.service.engine.hypothesis import Hypothesis
from sightline.service.engine.recorded_maps import Maps
from sightline.service.engine.request import FinishReason, GenerateRequest, StopCondition, Target
from sightline.service.engine.sampling import best_indices
from sightline.service.engine.scores import StepScores

MIN_TOGETHER = 4  # with fewer searches, lists are faster than arrays


@dataclass(frozen=True)
class Finished:
    """A finished hypothesis."""

    hypothesis: Hypothesis
    reason: FinishReason
    rank_score: float  # with length penalty


# Index of a beam, id of the next token, and sum of the processed log-probabilities with that token.
Candidate = tuple[int, int, float]


class Child(NamedTuple):
    """A candidate that becomes an open beam."""

    beam: int  # index of its parent
    token_id: int
    total: float
    stop: StopCondition | None  # has seen the token


class BeamGeneration(Generation):
    """Beam search with the results of `generate` in Hugging Face Transformers (version 5).

    `sightline.model.decoding.reference.beam` is the reference. Each beam has one row. Until the
    first new token there is only one beam; the other rows repeat its inputs, or skip the only step
    before the token. A new beam takes the row of its parent if that row is free, so that only the
    other beams need a copy of decoder state.
    """

    def __init__(
        self, active: ActiveRequest, request: GenerateRequest, manifest: Manifest, encoder_maps: Mapping[str, Maps]
    ) -> None:
        self._parameters = request.parameters
        super().__init__(active, request, manifest, encoder_maps)
        self._open = [self._first]  # beam i has row self.rows[i]
        self._finished: list[Finished] = []  # the best finished hypotheses so far, best first
        self._ranked: list[Candidate] | None = None  # from `rank_together`, for the next `advance`
        # Number of first target positions at which the states of two rows are known to be equal.
        # None are before the first new token, because rows without a beam may have failed.
        self._num_common = [[0] * request.parameters.num_beams for _ in range(request.parameters.num_beams)]

    def hypotheses(self) -> list[Hypothesis]:
        return self._open

    @property
    def num_first_rows(self) -> int:
        return self._parameters.num_beams if self._prefix else 1

    @property
    def _num_growing(self) -> int:
        return max(0, self._parameters.num_return_sequences - len(self._finished))

    def advance(self, scores: StepScores, beam_copies: BeamCopies) -> tuple[Target, ...]:
        candidates, self._ranked = self._ranked, None
        if candidates is None:
            if not all(isfinite(scores.best(row)[1]) for row in self.rows[: len(self._open)]):
                raise NonFiniteError
            if self._is_in_prefix:
                self._read_prefix(scores)
                return ()
            candidates = self._candidates(scores)
        num_beams, num_tokens = self._parameters.num_beams, self._num_tokens + 1
        children: list[Child] = []
        for rank, (beam, token_id, total) in enumerate(candidates):
            if len(children) == num_beams or total == -inf:  # forbidden tokens come last
                break
            stop = self._open[beam].stop
            if stop is not None:
                stop = stop.copy()
            reason = self._reason_after(token_id, num_tokens, stop)
            if reason is None:
                children.append(Child(beam, token_id, total, stop))
            elif rank < num_beams:
                self._finish((beam, token_id, total), scores, reason)
        if self._is_over(children):
            return self._targets()
        self._grow(children, scores, beam_copies)
        return ()

    @property
    def _num_tokens(self) -> int:
        """Number of tokens of each open beam."""
        return len(self._open[0].ids)

    @property
    def _is_in_prefix(self) -> bool:
        return self._num_tokens < len(self._prefix)

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

    @staticmethod
    def rank_together(searches: Sequence["BeamGeneration"], scores: StepScores) -> None:
        """Rank the candidates of several searches at once, for the next `advance` of each.

        Fewer than `MIN_TOGETHER` searches, those that need more than the top tokens, and those with
        scores that are not finite are left to `advance`.
        """
        if len(searches) < MIN_TOGETHER:
            return
        groups: dict[tuple[int, int, frozenset[int]], list[BeamGeneration]] = {}
        for search in searches:
            if not (search._is_in_prefix or search._is_processed):
                key = len(search._open), search._num_candidates, search._forbidden(search._open[0])
                groups.setdefault(key, []).append(search)
        for (num_open, count, forbidden), group in groups.items():
            rows = np.array([search.rows[:num_open] for search in group])
            ids, logprobs = _top_allowed(scores, rows, count, forbidden)
            sums = np.array([[beam.rank_score for beam in search._open] for search in group])
            is_finite = np.all(np.isfinite(logprobs[:, :, 0]), axis=1)
            ranked = _best(ids, logprobs, sums, count)
            for search, candidates, is_usable in zip(group, ranked, is_finite.tolist(), strict=True):
                search._ranked = candidates if is_usable else None

    def _candidates(self, scores: StepScores) -> list[Candidate]:
        """Return the best one-token extensions of the open beams, best first."""
        count = self._num_candidates
        if self._is_processed:
            ids, logprobs = self._best_of_all(scores, count)
            sums = np.array([beam.rank_score for beam in self._open])
            return _best(ids[None], logprobs[None], sums[None], count)[0]
        forbidden = self._forbidden(self._open[0])
        candidates: list[Candidate] = []
        for beam, (row, hypothesis) in enumerate(zip(self.rows, self._open, strict=False)):
            score = hypothesis.rank_score
            candidates += [
                (beam, token_id, -inf if token_id in forbidden else score + logprob)
                for token_id, logprob in zip(*scores.top_of(row, count + len(forbidden)), strict=True)
            ]
        candidates.sort(key=itemgetter(2), reverse=True)  # equal ones keep their order
        return candidates[:count]

    def _best_of_all(self, scores: StepScores, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the best tokens (beams, count) after the processors, and their scores."""
        processed = [
            self._processed(hypothesis, scores.logprobs(row))
            for row, hypothesis in zip(self.rows, self._open, strict=False)
        ]
        ids = np.stack([best_indices(row_scores, count) for row_scores in processed])
        return ids, np.take_along_axis(np.stack(processed), ids, axis=1)

    def _logprob(self, scores: StepScores, beam: int, token_id: int, total: float) -> float:
        """Return the model's log-probability of a candidate's token."""
        if self._is_processed:  # `total` has the processed log-probability
            return float(scores.logprobs(self.rows[beam])[token_id])
        return total - self._open[beam].rank_score

    def _finish(self, candidate: Candidate, scores: StepScores, reason: FinishReason) -> None:
        beam, token_id, total = candidate
        rank_score = self._penalised(total, self._num_tokens + 1)
        if len(self._finished) == self._parameters.num_beams:
            if rank_score <= self._finished[-1].rank_score:
                return
            del self._finished[-1]
        hypothesis = self._open[beam].fork()
        self._append(hypothesis, scores, self.rows[beam], token_id, self._logprob(scores, beam, token_id, total))
        self._finished.append(Finished(hypothesis, reason, rank_score))
        self._finished.sort(key=lambda finished: -finished.rank_score)

    def _penalised(self, score: float, num_tokens: int) -> float:
        num_counted = self._num_forced + num_tokens - len(self._prefix)
        return float(score / num_counted**self._parameters.length_penalty)

    def _grow(self, children: Sequence[Child], scores: StepScores, beam_copies: BeamCopies) -> None:
        """Replace the open beams by their children, each in the row of its parent where possible.

        The first child of a beam continues its hypothesis, the others continue copies.
        """
        parents, rows, num_beams = self._open, self.rows, len(children)
        assigned: list[Child | None] = [None] * num_beams
        others = []
        for child in children:
            if child.beam < num_beams and assigned[child.beam] is None:
                assigned[child.beam] = child
            else:
                others.append(child)
        if others:
            num_read = len(self.decoder_prompt_ids) + self._num_tokens  # by each row
            for index, child in zip([i for i, slot in enumerate(assigned) if slot is None], others, strict=True):
                assigned[index] = child
                changed = slice(self._num_common[index][child.beam], num_read)
                beam_copies.append((rows[child.beam], rows[index], changed))
                self._note_copy(child.beam, index, num_read)
        grown = [
            (
                child,
                parents[child.beam] if child.beam == index else parents[child.beam].fork(),
                self._logprob(scores, child.beam, child.token_id, child.total),
            )
            for index, child in enumerate(assigned)
            if child is not None
        ]
        self._open = [hypothesis for _, hypothesis, _ in grown]
        for (child, hypothesis, logprob), row in zip(grown, rows, strict=False):
            self._append(hypothesis, scores, rows[child.beam], child.token_id, logprob)
            hypothesis.rank_score, hypothesis.stop = child.total, child.stop
            scores.set_next_token(row, child.token_id)

    def _note_copy(self, source: int, target: int, num_read: int) -> None:
        """Update the numbers of common positions after a copy of a whole row."""
        common = self._num_common[source][:]
        common[source] = common[target] = num_read
        self._num_common[target] = common
        for other, number in zip(self._num_common, common, strict=True):
            other[target] = number

    def _is_over(self, children: Sequence[Child]) -> bool:
        if not children:
            return True
        parameters = self._parameters
        if len(self._finished) < parameters.num_beams:
            return False
        if parameters.early_stopping is True:
            return True
        # As in Transformers, the search ends even if a longer continuation could exceed this bound.
        num_tokens = self._num_tokens + 1
        if parameters.early_stopping == "never" and parameters.length_penalty > 0:
            num_tokens = self._max_tokens
        best = self._penalised(children[0].total, num_tokens)
        return best <= self._finished[-1].rank_score

    def _targets(self) -> tuple[Target, ...]:
        return tuple(
            self._target(finished.hypothesis, finished.reason, self._parameters.length_penalty)
            for finished in self._finished[: self._parameters.num_return_sequences]
        )


def _top_allowed(
    scores: StepScores, rows: NDArray[np.int64], count: int, forbidden: frozenset[int]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return top tokens of rows and their log-probabilities, which are -inf for forbidden tokens.

    Both arrays have the shape (*rows.shape, at least count); `count` of them are allowed.
    """
    ids, logprobs = scores.top(rows, count + len(forbidden))
    if forbidden:
        logprobs[np.isin(ids, list(forbidden))] = -np.inf
    return ids, logprobs


def _best(
    ids: NDArray[np.int64], logprobs: NDArray[np.float32], sums: NDArray[np.float64], count: int
) -> list[list[Candidate]]:
    """Return the `count` best candidates of each search, best first.

    Ties are ranked by the order of their beams, then by the order of the tokens. `ids` and
    `logprobs`, after the processors, are (searches, beams, tokens); `sums` is (searches, beams).
    """
    num_searches, num_beams, num_tokens = ids.shape
    totals = (logprobs + sums[:, :, None]).reshape(num_searches, -1)
    best = np.argsort(-totals, axis=1, kind="stable")[:, :count]
    beams = best // num_tokens
    best = best + np.arange(0, ids.size, num_beams * num_tokens)[:, None]
    columns = beams.tolist(), ids.ravel()[best].tolist(), totals.ravel()[best].tolist()
    return [list(zip(*parts, strict=True)) for parts in zip(*columns, strict=True)]
