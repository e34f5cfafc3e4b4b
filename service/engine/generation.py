"""Per-request state of the engine: submitted requests and running generations."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import TOP_TOKENS, VOCABULARY_OUTPUTS, Manifest
from sightline.service.engine.hypothesis import Hypothesis
from sightline.service.engine.processors import changes_scores, make_processors, process
from sightline.service.engine.recorded_maps import STEP_KINDS, MapRecorder, Maps, map_outputs
from sightline.service.engine.request import (
    EncodeRequest,
    Event,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Request,
    StopCondition,
    Target,
    Timings,
    Token,
    call_of,
)
from sightline.service.engine.scores import StepScores

Sink = Callable[[Event], Any]
# (source, target, positions): the states of row `source` are copied to row `target`. At other
# positions of the target axis, the two rows are equal.
BeamCopies = list[tuple[int, int, slice]]


@dataclass(eq=False)
class ActiveRequest:
    """One submitted request and its progress. Times are in seconds of the engine's clock."""

    id: int
    request: Request
    sink: Sink
    submitted: float
    encode_started: float = 0.0
    encode_ended: float = 0.0
    has_ended: bool = False

    def timings(self, now: float) -> Timings:
        """Return the durations of a request that finishes at `now` with a result."""
        return Timings(
            queue=1000 * (self.encode_started - self.submitted),
            encode=1000 * (self.encode_ended - self.encode_started),
            decode=1000 * (now - self.encode_ended),
        )


class NonFiniteError(Exception):
    """A graph returned NaN or infinity."""


class RowOwner:
    """A request that has rows."""

    prefill_ids: tuple[int, ...] = ()  # the prompt of a decoder-only model

    def __init__(self, active: ActiveRequest, request: Request) -> None:
        """Create an owner without rows; `request` is that of `active` with its own type."""
        self.active_request = active
        self.request = request
        self.call = call_of(request)
        self.rows: list[int] = []  # assigned and renumbered by `Rows`


class PromptEncoding(RowOwner):
    """An encode request of a decoder-only model, which needs a row to read its prompt."""

    request: EncodeRequest

    def __init__(self, active: ActiveRequest, request: EncodeRequest) -> None:
        super().__init__(active, request)
        self.prefill_ids = request.source_ids


class Generation(RowOwner, ABC):
    """A running request: its rows, its hypotheses, and the choice of their next tokens."""

    request: GenerateRequest

    def __init__(
        self, active: ActiveRequest, request: GenerateRequest, manifest: Manifest, encoder_maps: Mapping[str, Maps]
    ) -> None:
        """Create a generation without rows; `encoder_maps` are those that the request selects."""
        super().__init__(active, request)
        parameters, num_source = request.parameters, len(request.source_ids)
        self.num_cached_tokens = 0  # prompt tokens whose states came from the prefix cache
        self.decoder_prompt_ids = manifest.decoder_prompt_ids(request.source_ids)
        if manifest.is_decoder_only:
            self.prefill_ids = self.decoder_prompt_ids
        self._prefix = request.target_prefix
        # As in Transformers, tokens that the model is forced to generate count in the length, and a
        # prefix of the caller and all tokens before it do not.
        self._num_forced = 0
        if not manifest.is_decoder_only and len(self._prefix) == request.num_forced:
            self._num_forced = request.num_forced + len(self.decoder_prompt_ids) - 1
        self._max_tokens = min(len(self._prefix) + parameters.num_new_tokens, manifest.max_new_tokens_for(num_source))
        self._min_tokens = len(self._prefix) + parameters.min_new_tokens  # end tokens are forbidden before
        self._num_alternatives = parameters.top_logprobs
        self._end_ids = manifest.tokens.end_ids
        self._suppressed = frozenset((*manifest.generation.suppress_tokens, *parameters.suppress_tokens))
        self._suppressed_or_end = self._suppressed.union(self._end_ids)
        self._forces_end = manifest.generation.force_end
        self._processors = make_processors(
            parameters,
            self._end_ids,
            manifest.generation.suppress_tokens,
            self._max_tokens - len(self._prefix) if self._forces_end else None,
            manifest.generation.bad_words,
        )
        # If only few tokens can be forbidden, the top tokens of a step suffice for the choice.
        num_forbidden = len(self._suppressed_or_end if parameters.min_new_tokens else self._suppressed)
        num_top = min(TOP_TOKENS, manifest.limits.vocabulary)
        self._reads_logits = (
            parameters.do_sample
            or request.matcher is not None
            or changes_scores(parameters)
            or bool(manifest.generation.bad_words)
            or self._num_candidates + num_forbidden > num_top
        )
        maps = MapRecorder(request, encoder_maps, len(self.decoder_prompt_ids))
        self._first = Hypothesis(maps, request.stop, request.matcher and request.matcher.copy())
        self.records_maps = bool(self._first.maps.steps)
        # With several hypotheses or a budget, maps are recorded after each step.
        self.may_record_later = parameters.num_beams == 1 and request.map_budget is None
        self.num_logged = 0  # number of logged steps that are recorded, or before the first step
        self.records_prompt = request.prompt_rows and "decoder" in request.attention
        self._row_sizes: list[int] = []  # number of map values that each step has added to a target
        self._num_charged = 0  # number of map values charged to the budget
        # Outputs of the decoder graph that this generation needs in addition to `TOP_OUTPUTS`.
        self.outputs = map_outputs(manifest, request.attention, STEP_KINDS)
        if self._prefix or self._reads_logits or self._forces_end:
            self.outputs |= VOCABULARY_OUTPUTS
        # True: tokens are chosen from the whole vocabulary, even if the model has a shortlist.
        self.needs_vocabulary = bool(parameters.top_logprobs) or not VOCABULARY_OUTPUTS.isdisjoint(self.outputs)

    def set_prompt_maps(self, blocks: Sequence[Maps]) -> None:
        """Set the decoder maps of the prompt's chunks, before the first step."""
        self._first.maps.prompt_blocks = blocks

    def charge_step(self) -> None:
        """Charge the map budget for the values that the next step adds to the response.

        A beam search may continue after enough hypotheses have finished; `charge_targets` then
        charges the difference.
        """
        budget = self.request.map_budget
        if budget is not None:
            hypotheses = self.hypotheses()
            maps = hypotheses[0].maps  # all have the same length
            columns = {kind: maps.next_columns(kind) for kind in maps.steps}
            self._row_sizes.append(
                sum(budget.per_column[kind] * columns[kind] for kind in budget.per_column if kind in columns)
            )
            self._charge(self._num_growing * self._row_sizes[-1])
            num_bytes = sum(each * columns[kind] for kind, each in budget.bytes_per_column.items() if kind in columns)
            budget.use_bytes(len(hypotheses) * num_bytes)

    def charge_targets(self, targets: Sequence[Target]) -> None:
        """Charge the map budget for values of the targets that `charge_step` did not charge."""
        if self.request.map_budget is not None:
            self._charge(sum(sum(self._row_sizes[: len(target.tokens)]) for target in targets) - self._num_charged)

    def _charge(self, numbers: int) -> None:
        assert self.request.map_budget is not None
        self.request.map_budget.remaining -= numbers
        self._num_charged += numbers

    @property
    def _num_candidates(self) -> int:
        """Number of most probable allowed tokens of each row that a step considers."""
        return 1

    def _forbidden(self, hypothesis: Hypothesis) -> frozenset[int]:
        """Return the tokens that are forbidden as the next token, apart from other processors."""
        return self._suppressed_or_end if len(hypothesis.ids) < self._min_tokens else self._suppressed

    def _must_end(self, hypothesis: Hypothesis) -> bool:
        """Return True if the next token is the last one and must be the end token."""
        return self._forces_end and len(hypothesis.ids) == self._max_tokens - 1

    def _target(self, hypothesis: Hypothesis, reason: FinishReason, length_penalty: float = 0.0) -> Target:
        has_forced_end = self._forces_end and len(hypothesis.ids) == self._max_tokens
        return hypothesis.target(
            reason, len(self._prefix), length_penalty, self._num_forced, has_forced_end=has_forced_end
        )

    @property
    def num_first_rows(self) -> int:
        """Number of rows that take part in the first step."""
        return 1

    @property
    def _num_growing(self) -> int:
        """Number of returned targets that will certainly get another token."""
        return 1

    @property
    def map_error(self) -> FailureCode | None:
        """Failure code if the attention maps of the call exceed a limit, else None."""
        return None if self.request.map_budget is None else self.request.map_budget.error

    @abstractmethod
    def hypotheses(self) -> list[Hypothesis]:
        """Return the hypotheses of the first rows; further rows are not in use yet."""

    @abstractmethod
    def advance(self, scores: StepScores, beam_copies: BeamCopies) -> tuple[Target, ...]:
        """Process the scores of one step, and set the next token of each row in `scores`.

        Rows whose state must be copied to other rows are appended to `beam_copies`. Returns the
        targets, best first, if the generation has ended, or else nothing. Raises `NonFiniteError`.
        """

    def take_best(self, token_id: int, logprob: float) -> bool:
        """Take the most probable token of a step if `advance` would do nothing else; otherwise
        return False and change nothing.
        """
        return False

    @property
    def new_token(self) -> Token | None:
        """The token generated by the last step; None if the step processed the prefix."""
        hypothesis = self._first
        if len(hypothesis.ids) <= len(self._prefix):
            return None
        return Token(hypothesis.ids[-1], hypothesis.logprobs[-1], hypothesis.alternatives[-1])

    def _processed(self, hypothesis: Hypothesis, scores: NDArray[Any]) -> NDArray[Any]:
        """Return scores (V,) after the request's logits processors."""
        changed = scores.copy()
        if hypothesis.matcher is not None:
            np.copyto(changed, -np.inf, where=~hypothesis.matcher.allowed())
        num_generated = len(hypothesis.ids) - len(self._prefix)
        process(self._processors, changed, [*self.decoder_prompt_ids, *hypothesis.ids], num_generated)
        return changed

    def _append(self, hypothesis: Hypothesis, scores: StepScores, row: int, token_id: int, logprob: float) -> None:
        if hypothesis.matcher is not None and len(hypothesis.ids) >= len(self._prefix):
            hypothesis.matcher.update(token_id)
        hypothesis.append(token_id, logprob, scores.alternatives(row, self._num_alternatives))

    def _reason_to_end(self, hypothesis: Hypothesis) -> FinishReason | None:
        """Return the finish reason if a hypothesis ends with its last token."""
        num_tokens = len(hypothesis.ids)
        if num_tokens <= len(self._prefix):
            return "forced" if num_tokens == self._max_tokens else None
        return self._reason_after(hypothesis, hypothesis.ids[-1], num_tokens, hypothesis.stop)

    def _reason_after(
        self, hypothesis: Hypothesis, token_id: int, num_tokens: int, stop: StopCondition | None
    ) -> FinishReason | None:
        """Return the finish reason if a hypothesis ends with a generated token.

        `num_tokens` includes the token. The stop condition has not seen it yet. A text that had to
        end before it satisfies its constraint was cut.
        """
        if token_id in self._end_ids:
            return "eos" if hypothesis.matcher is None or hypothesis.matcher.is_complete else "length"
        if stop is not None and stop.update(token_id):
            return "stop"
        return "length" if num_tokens == self._max_tokens else None
