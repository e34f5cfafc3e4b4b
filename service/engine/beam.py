"""Beam search: a generation with one row of the batch for each beam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from sightline.base.bundle import Manifest
from sightline.service.engine.generation import ActiveRequest, BeamCopies, Generation, NonFiniteError
from sightline.service.engine.hypothesis import Hypothesis
from sightline.service.engine.recorded_maps import Maps
from sightline.service.engine.request import FinishReason, GenerateRequest, StopCondition, Target
from sightline.service.engine.sampling import best_indices
from sightline.service.engine.scores import StepScores
from sightline.service.runtime.runner import Array


@dataclass(frozen=True)
class Finished:
    """A finished hypothesis."""

    hypothesis: Hypothesis
    reason: FinishReason
    rank_score: float  # with length penalty


# Index of a beam, id of the next token, and sum of the processed log-probabilities with that token.
Candidate = tuple[int, int, float]


class Child(NamedTuple):
    """A candidate that becomes an open beam, or a finished hypothesis."""

    beam: int  # index of its parent
    token_id: int
    total: float
    logprob: float  # of the token, before the processors
    stop: StopCondition | None  # has seen the token


class BeamGeneration(Generation):
    """Beam search with the results of `generate` in Hugging Face Transformers (version 5).

    `tests/support/reference_decoding.py` has the reference. Each beam has one row. Until the
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
        opened, rows, num_beams = self._open, self.rows, self._parameters.num_beams
        for row, _ in zip(rows, opened, strict=False):
            if not isfinite(scores.best(row)[1]):
                raise NonFiniteError
        if self._num_tokens < len(self._prefix):
            first, token_id = rows[0], self._prefix[self._num_tokens]
            self._append(self._first, scores, first, token_id, float(scores.logprobs(first)[token_id]))
            for row in rows:
                scores.set_next_token(row, token_id)
            return ()
        num_tokens = self._num_tokens + 1
        # True: the next tokens are chosen by scores after the logits processors.
        is_processed = self._reads_logits or self._must_end(opened[0])
        children: list[Child] = []
        for rank, (beam, token_id, total) in enumerate(self._candidates(scores, is_processed)):
            if len(children) == num_beams or total == -inf:  # forbidden tokens come last
                break
            parent = opened[beam]
            stop = None if parent.stop is None else parent.stop.copy()
            logprob = float(scores.logprobs(rows[beam])[token_id]) if is_processed else total - parent.rank_score
            child = Child(beam, token_id, total, logprob, stop)
            reason = self._reason_after(parent, token_id, num_tokens, stop)
            if reason is None:
                children.append(child)
            elif rank < num_beams:
                self._finish(child, scores, reason)
        if self._is_over(children):
            return self._targets()
        self._grow(children, scores, beam_copies)
        return ()

    @property
    def _num_tokens(self) -> int:
        """Number of tokens of each open beam."""
        return len(self._open[0].ids)

    @property
    def _num_candidates(self) -> int:
        """Number of extensions: enough that `num_beams` of them do not end, if possible."""
        return max(2, 1 + len(self._end_ids)) * self._parameters.num_beams

    def _candidates(self, scores: StepScores, is_processed: bool) -> list[Candidate]:
        """Return the best one-token extensions of the open beams, best first.

        Ties are ranked by the order of their beams, then by the order of the tokens.
        """
        count = self._num_candidates
        forbidden = frozenset[int]() if is_processed else self._forbidden(self._open[0])
        per_beam = count
        if self.request.stop is None and self._num_tokens + 1 < self._max_tokens:
            # At most `num_beams` extensions of a beam continue, and only end tokens do not.
            per_beam = self._parameters.num_beams + len(self._end_ids)
        ids: list[int] = []
        totals: list[float] = []
        for row, hypothesis in zip(self.rows, self._open, strict=False):
            if is_processed:
                top_ids, logprobs = self._best_processed(hypothesis, scores.logprobs(row), per_beam)
            else:
                top_ids, logprobs = scores.top_of(row, per_beam + len(forbidden))
            score = hypothesis.rank_score
            ids += top_ids
            totals += [score + logprob for logprob in logprobs]
        if forbidden:
            totals = [-inf if token_id in forbidden else total for token_id, total in zip(ids, totals, strict=True)]
        per_beam = len(ids) // len(self._open)
        best = sorted(range(len(ids)), key=totals.__getitem__, reverse=True)  # equal ones keep their order
        return [(index // per_beam, ids[index], totals[index]) for index in best[:count]]

    def _best_processed(self, hypothesis: Hypothesis, logprobs: Array, count: int) -> tuple[list[int], list[float]]:
        """Return the best tokens after the processors, and their scores."""
        processed = self._processed(hypothesis, logprobs)
        ids = best_indices(processed, count)
        return ids.tolist(), processed[ids].tolist()

    def _finish(self, child: Child, scores: StepScores, reason: FinishReason) -> None:
        rank_score = self._penalised(child.total, self._num_tokens + 1)
        if len(self._finished) == self._parameters.num_beams:
            if rank_score <= self._finished[-1].rank_score:
                return
            del self._finished[-1]
        hypothesis = self._open[child.beam].fork()
        self._append(hypothesis, scores, self.rows[child.beam], child.token_id, child.logprob)
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
        grown = [*parents, *parents[:1] * num_beams][:num_beams]
        if others:
            num_read = len(self.decoder_prompt_ids) + self._num_tokens  # by each row
            for index, child in zip([i for i, slot in enumerate(assigned) if slot is None], others, strict=True):
                assigned[index], grown[index] = child, parents[child.beam].fork()
                changed = slice(self._num_common[index][child.beam], num_read)
                beam_copies.append((rows[child.beam], rows[index], changed))
                self._note_copy(child.beam, index, num_read)
        self._open = grown
        for row, hypothesis, new in zip(rows, grown, assigned, strict=False):
            assert new is not None
            beam, token_id, hypothesis.rank_score, logprob, hypothesis.stop = new
            self._append(hypothesis, scores, rows[beam], token_id, logprob)
            scores.set_next_token(row, token_id)

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
