"""Requests to the engine and its events. One request is one input; the use cases split calls into requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from service.parameters import GenerateParameters

FinishReason = Literal["eos", "length", "stop", "forced"]
FailureCode = Literal["deadline_exceeded", "overloaded", "draining", "engine_dead", "response_too_large", "internal"]


class StopCondition(Protocol):
    """Says when a generation has produced what ends it."""

    def update(self, token_id: int) -> bool:
        """Take the next generated token; True ends the sequence with finish reason "stop"."""
        ...

    def copy(self) -> "StopCondition":
        """One in the same state, for a hypothesis that branches off."""
        ...


@dataclass
class MapBudget:
    """Numbers of attention maps that the requests of one call may still have together; the engine counts them.

    Without it a call's maps would all be kept until its texts are written and found too large.
    """

    left: int
    # By kind, of one column of a row: the numbers in the response, and the bytes that recording and writing them take.
    per_column: Mapping[str, int]
    bytes_per_column: Mapping[str, int]
    use: Callable[[int], bool]  # takes bytes of the memory for responses; False if there is no room for more
    _has_room: bool = True

    def use_bytes(self, num_bytes: int) -> None:
        self._has_room = self._has_room and self.use(num_bytes)

    @property
    def refusal(self) -> FailureCode | None:
        """The reason why the call cannot be answered; None if it can so far."""
        if self.left < 0:
            return "response_too_large"
        return None if self._has_room else "overloaded"


@dataclass(frozen=True)
class GenerateRequest:
    """Generate targets from one source."""

    request_id: str
    source_ids: tuple[int, ...]
    deadline: float  # on the engine's clock, seconds
    parameters: GenerateParameters = GenerateParameters()  # noqa: RUF009 - it is frozen
    seed: int | None = None  # of this sequence; that of the parameters, or 0, if absent
    target_prefix: tuple[int, ...] = ()  # the tokens that every target begins with
    stop: StopCondition | None = None  # receives the generated tokens, not the prefix
    attention: frozenset[str] = frozenset()  # kinds of maps to keep
    map_budget: MapBudget | None = None  # the request fails with its refusal
    stream: bool = False  # one TokenEvent a generated token besides the result; not with beams

    @property
    def num_targets(self) -> int:
        """Sequences that the result has: the best of a beam search, otherwise one."""
        return self.parameters.num_return_sequences if self.parameters.num_beams > 1 else 1

    @property
    def sampling_seed(self) -> int:
        return (self.parameters.seed or 0) if self.seed is None else self.seed


@dataclass(frozen=True)
class EncodeRequest:
    """Run the encoder over one source."""

    request_id: str
    source_ids: tuple[int, ...]
    deadline: float
    wants_labels: bool = False
    attention: frozenset[str] = frozenset()  # kinds of maps to keep, of the encoder alone


@dataclass(frozen=True)
class SimilarRequest:
    """Compare tokens with every token by their embeddings."""

    request_id: str
    token_ids: tuple[int, ...]
    deadline: float


SourceRequest = GenerateRequest | EncodeRequest  # what the encoder reads
Request = SourceRequest | SimilarRequest


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float  # natural logarithm, before temperature, penalties and filters
    alternatives: tuple[tuple[int, float], ...] = ()  # the likeliest tokens of its place, best first, with theirs


@dataclass(frozen=True)
class Timings:
    """Where a request's time went, in milliseconds."""

    queue: float = 0.0
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class TokenEvent:
    """The next token of a streaming request."""

    token: Token


@dataclass(frozen=True)
class Target:
    """One generated sequence."""

    tokens: tuple[Token, ...]  # those of the prefix first; the end token included where it was generated
    finish_reason: FinishReason
    score: float  # the log-probabilities after the prefix summed; for beams over their number ** length_penalty
    attention: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # kind to (L, H, rows, columns)


@dataclass(frozen=True)
class Generated:
    """A generation that ended."""

    targets: tuple[Target, ...]  # best first
    timings: Timings


@dataclass(frozen=True)
class Encoded:
    """The encoder's last layer over one source, and what was asked for besides."""

    hidden: NDArray[np.float32]  # (S, M), no padding
    timings: Timings
    label_logprobs: NDArray[np.float32] | None = None  # (C,)
    attention: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # kind to (L, H, S, columns)


@dataclass(frozen=True)
class Compared:
    """How similar tokens are to every token."""

    cosines: NDArray[np.float32]  # (N, V)
    timings: Timings


@dataclass(frozen=True)
class Failed:
    """A request that ended without a result."""

    code: FailureCode


@dataclass(frozen=True)
class Cancelled:
    """A request that its client gave up."""


Final = Generated | Encoded | Compared | Failed | Cancelled  # every request ends with exactly one
Event = TokenEvent | Final
