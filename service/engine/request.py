"""What the engine is asked, and what it answers. One request is one sequence; the edge splits longer calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["eos", "length", "stop", "forced"]
FailureCode = Literal["deadline_exceeded", "queue_timeout", "draining", "engine_dead", "internal"]


class StopCondition(Protocol):
    """Says when a generation has produced what ends it."""

    def update(self, token_id: int) -> bool:
        """Take the next generated token; True ends the sequence with finish reason "stop"."""
        ...


@dataclass(frozen=True)
class DecodingParameters:
    """How to pick tokens. Checked at the edge; names and meanings are Hugging Face's."""

    max_new_tokens: int = 128  # the end token counts
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    seed: int = 0  # read only with do_sample


@dataclass(frozen=True)
class GenerateRequest:
    """Generate one target from one source."""

    request_id: str
    source_ids: tuple[int, ...]
    deadline: float  # on the engine's clock, seconds
    parameters: DecodingParameters = DecodingParameters()
    stop: StopCondition | None = None
    forced_target: tuple[int, ...] | None = None  # score exactly these tokens, the end token last, instead of picking
    attention: frozenset[str] = frozenset()  # kinds of maps to keep
    stream: bool = False  # one TokenEvent a token besides the result


@dataclass(frozen=True)
class EncodeRequest:
    """Run the encoder over one source."""

    request_id: str
    source_ids: tuple[int, ...]
    deadline: float


Request = GenerateRequest | EncodeRequest


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float  # natural logarithm, before temperature and filters


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
class Generated:
    """A generation that ended."""

    tokens: tuple[Token, ...]  # the end token included where it was generated
    finish_reason: FinishReason
    timings: Timings
    attention: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # kind to (L, H, rows, columns)

    @property
    def score(self) -> float:
        """Sum of the tokens' log-probabilities."""
        return sum(token.logprob for token in self.tokens)


@dataclass(frozen=True)
class Encoded:
    """The encoder's last layer over one source."""

    hidden: NDArray[np.float32]  # (S, M), no padding
    timings: Timings


@dataclass(frozen=True)
class Failed:
    """A request that ended without a result."""

    code: FailureCode


@dataclass(frozen=True)
class Cancelled:
    """A request that its client gave up."""


Final = Generated | Encoded | Failed | Cancelled  # every request ends with exactly one
Event = TokenEvent | Final
