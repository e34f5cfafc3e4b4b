"""What the engine keeps of one request: from its submission, and while it runs in rows of the decoder."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from service.bundle import Manifest
from service.engine.attention import STEP_KINDS, MapRecorder, Maps, map_outputs
from service.engine.hypothesis import Hypothesis
from service.engine.processors import changes_other_tokens, make_processors, process
from service.engine.request import (
    Event,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Request,
    SimilarRequest,
    SourceRequest,
    Target,
    Timings,
    Token,
)
from service.engine.scores import WHOLE, StepScores

Sink = Callable[[Event], Any]
Moves = list[tuple[int, int]]  # rows whose state becomes that of another: (source, target)


@dataclass(eq=False)
class Handle:
    """One submitted request, and where it stands. Times are seconds on the engine's clock."""

    id: int
    request: Request
    sink: Sink
    submitted: float
    encode_started: float = 0.0
    encode_ended: float = 0.0
    has_ended: bool = False

    @property
    def source_request(self) -> SourceRequest:
        """The request, of one that the encoder runs."""
        assert not isinstance(self.request, SimilarRequest), "it has no source"
        return self.request

    def timings(self, now: float) -> Timings:
        """Of a request that ends now with a result."""
        return Timings(
            queue=1000 * (self.encode_started - self.submitted),
            encode=1000 * (self.encode_ended - self.encode_started),
            decode=1000 * (now - self.encode_ended),
        )


class NotFiniteError(Exception):
    """The decoder gave numbers that are not finite."""


class Generation(ABC):
    """A running request: its rows, what they have written, and how their next tokens are picked."""

    def __init__(
        self, handle: Handle, request: GenerateRequest, manifest: Manifest, encoder_maps: Mapping[str, Maps]
    ) -> None:
        """`encoder_maps` are those that the request wants."""
        self.handle = handle
        self.request = request
        self.rows: list[int] = []  # given, and renumbered, by whoever owns the rows
        parameters, num_source = request.parameters, len(request.source_ids)
        self.beginning = manifest.beginning(request.source_ids)
        self._prefix = request.target_prefix
        self._end_id = manifest.tokens.end_id
        self._max_tokens = min(len(self._prefix) + parameters.num_new_tokens, manifest.room(num_source))
        self._min_tokens = len(self._prefix) + parameters.min_new_tokens  # the end token comes no sooner
        self._num_alternatives = parameters.top_logprobs
        self._processors = make_processors(parameters, self._end_id)
        # Where the end token alone may be forbidden, the step's top tokens hold all that can be picked.
        self._reads_logits = parameters.do_sample or changes_other_tokens(self._processors)
        maps = MapRecorder(request.attention, num_source, encoder_maps, len(self.beginning))
        self._first = Hypothesis(maps, request.stop)
        self.wants_maps = bool(self._first.maps.steps)
        self._row_sizes: list[int] = []  # numbers that each step has added to a target's maps
        self._paid = 0  # numbers
        # The step's outputs that it needs besides those that every row needs.
        self.outputs = map_outputs(manifest, request.attention, STEP_KINDS)
        if self._prefix or self._reads_logits:
            self.outputs |= WHOLE

    def count_maps(self) -> None:
        """Pay with the request's budget for what the step that comes is certain to add to the maps of the answer.

        A search may go on when as many have ended as it returns; `settle` pays for what it returns instead of those.
        """
        budget = self.request.map_budget
        if budget is not None:
            hypotheses = self.hypotheses()
            maps = hypotheses[0].maps  # all are as long
            columns = {kind: maps.next_columns(kind) for kind in maps.steps}
            self._row_sizes.append(sum(budget.per_column[kind] * count for kind, count in columns.items()))
            self._pay(self._num_growing * self._row_sizes[-1])
            budget.use_bytes(len(hypotheses) * sum(budget.bytes_per_column[kind] * columns[kind] for kind in columns))

    def settle(self, targets: Sequence[Target]) -> None:
        """Pay for the maps of what is returned, so far as it is more than was certain."""
        if self.request.map_budget is not None:
            self._pay(sum(sum(self._row_sizes[: len(target.tokens)]) for target in targets) - self._paid)

    def _pay(self, numbers: int) -> None:
        assert self.request.map_budget is not None
        self.request.map_budget.left -= numbers
        self._paid += numbers

    @property
    def _num_growing(self) -> int:
        """How many of the targets that it returns are certain to have another token."""
        return 1

    @property
    def map_refusal(self) -> FailureCode | None:
        """The reason why the maps of its call cannot be returned; None if they can so far."""
        return None if self.request.map_budget is None else self.request.map_budget.refusal

    @abstractmethod
    def hypotheses(self) -> list[Hypothesis]:
        """What each of the first rows has written; the rows beyond do not count."""

    @abstractmethod
    def advance(self, scores: StepScores, moves: Moves) -> tuple[Target, ...]:
        """Take a step's scores; the targets, best first, once the generation is over.

        What a row reads next is set by `scores.choose`; whose state it becomes, where not its own, to `moves`.

        Raises:
            NotFiniteError: a row's scores are not numbers.
        """

    @property
    def new_token(self) -> Token | None:
        """The token that the last step generated; None where it read the prefix."""
        written = self._first
        if len(written.ids) <= len(self._prefix):
            return None
        return Token(written.ids[-1], written.logprobs[-1], written.alternatives[-1])

    def _processed(self, hypothesis: Hypothesis, scores: NDArray[Any]) -> NDArray[Any]:
        """Scores (V,) as the request's processors leave them."""
        changed = scores.copy()
        num_generated = len(hypothesis.ids) - len(self._prefix)
        process(self._processors, changed, [*self.beginning, *hypothesis.ids], num_generated)
        return changed

    def _append(self, hypothesis: Hypothesis, scores: StepScores, row: int, token_id: int, logprob: float) -> None:
        hypothesis.append(token_id, logprob, scores.alternatives(row, self._num_alternatives))

    def _reason_to_end(self, hypothesis: Hypothesis) -> FinishReason | None:
        """Why a hypothesis ends with its last token."""
        num_tokens, token_id = len(hypothesis.ids), hypothesis.ids[-1]
        if num_tokens <= len(self._prefix):
            return "forced" if num_tokens == self._max_tokens else None
        if token_id == self._end_id:
            return "eos"
        if hypothesis.stop is not None and hypothesis.stop.update(token_id):
            return "stop"
        return "length" if num_tokens == self._max_tokens else None
