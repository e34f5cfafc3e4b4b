"""Requests to the engine and their events.

A call with several inputs has one request for each input.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sightline.service.parameters import NEUTRAL, GenerateParameters

FinishReason = Literal["eos", "length", "stop", "forced"]
FailureCode = Literal[
    "deadline_exceeded",
    "overloaded",
    "loading",
    "draining",
    "engine_dead",
    "response_too_large",
    "model_not_found",  # the model was unloaded before the request ended
    "internal",
]


class StopCondition(Protocol):
    """Stopping criterion of a generation."""

    def update(self, token_id: int) -> bool:
        """Process a generated token; True ends the sequence with finish reason "stop"."""
        ...

    def copy(self) -> "StopCondition":
        """Return a copy with the same state, for a forked hypothesis."""
        ...


class Matcher(Protocol):
    """State of a constraint on the generated tokens of a hypothesis."""

    @property
    def is_complete(self) -> bool:
        """True if the text so far satisfies the constraint."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """Return the tokens (V,) that may come next; end tokens only if the text is complete.

        A state from which no text is reached, or which exceeds a limit, allows only end tokens.
        """
        ...

    def update(self, token_id: int) -> None:
        """Process a generated token."""
        ...

    def copy(self) -> "Matcher":
        """Return a copy with the same state, for another hypothesis."""
        ...


@dataclass
class MapBudget:
    """Remaining number of attention map values of one call, shared by its requests.

    The engine charges it in each step, so that a call with too many values fails early instead of
    recording all its maps first.
    """

    remaining: int
    # For one column of a row, by kind: the number of values in the response, and the memory.
    per_column: Mapping[str, int]
    bytes_per_column: Mapping[str, int]
    use: Callable[[int], bool]  # takes bytes from the memory for responses; False if the limit is reached
    _fits: bool = True

    def use_bytes(self, num_bytes: int) -> None:
        self._fits = self._fits and self.use(num_bytes)

    @property
    def error(self) -> FailureCode | None:
        """Failure code if a limit is exceeded, else None."""
        if self.remaining < 0:
            return "response_too_large"
        return None if self._fits else "overloaded"


@dataclass(frozen=True)
class MapPart:
    """Layers and heads of one kind of attention maps, in the order of the result."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]

    @cached_property
    def heads_and_layers(self) -> tuple[Any, ...]:
        """Index of maps (H, L, ...): of one head and one layer slices, which are faster."""
        if len(self.heads) == len(self.layers) == 1:
            return slice(self.heads[0], self.heads[0] + 1), slice(self.layers[0], self.layers[0] + 1)
        return np.ix_(self.heads, self.layers)


@dataclass(frozen=True)
class GenerateRequest:
    """Generate targets from one source."""

    request_id: str
    source_ids: tuple[int, ...]
    deadline: float  # in seconds of the engine's clock
    parameters: GenerateParameters = NEUTRAL
    seed: int | None = None  # overrides the seed of the parameters; 0 if both are None
    target_prefix: tuple[int, ...] = ()  # tokens at the start of every target
    num_forced: int = 0  # number of prefix tokens that the model is forced to generate, such as a language
    # Ascending indices of source tokens that the encoder reads, but the decoder cannot attend to.
    hidden_source_tokens: tuple[int, ...] = ()
    stop: StopCondition | None = None  # receives the generated tokens, without the prefix
    matcher: Matcher | None = None  # of the constraint in the parameters; has processed the client's prefix
    attention: frozenset[str] = frozenset()  # kinds of attention maps to record
    prompt_rows: bool = False  # record the rows of the prompt too; only for decoder-only models
    # Layers and heads to record of `cross` and `decoder`, by kind; all of a kind that is absent.
    map_parts: Mapping[str, MapPart] = field(default_factory=dict)
    map_budget: MapBudget | None = None  # the request fails with its `error`
    contributions: str | None = None  # method of the maps of the targets, in place of recorded weights
    caller: str = ""  # label of the API key: callers get equal shares, and never share states of prompts
    stream: bool = False  # emit a TokenEvent for each generated token; not with beam search

    @property
    def num_targets(self) -> int:
        """Number of targets in the result."""
        return self.parameters.num_return_sequences if self.parameters.num_beams > 1 else 1

    @property
    def num_visible_source_tokens(self) -> int:
        """Number of source tokens that the decoder can attend to."""
        return len(self.source_ids) - len(self.hidden_source_tokens)

    @property
    def visible_source_tokens(self) -> list[int]:
        """Indices of the source tokens that the decoder can attend to."""
        hidden = set(self.hidden_source_tokens)
        return [index for index in range(len(self.source_ids)) if index not in hidden]

    @property
    def sampling_seed(self) -> int:
        return (self.parameters.seed or 0) if self.seed is None else self.seed


@dataclass(frozen=True)
class EncodeRequest:
    """Run the encoder over one source."""

    request_id: str
    source_ids: tuple[int, ...]
    deadline: float
    return_labels: bool = False
    attention: frozenset[str] = frozenset()  # kinds of encoder maps to return
    caller: str = ""  # see `GenerateRequest`
    return_logits: bool = False  # of the labels, see `LABEL_LOGITS`
    predicted: tuple[int, ...] = ()  # positions whose logits of all tokens are returned
    return_largest: bool = False  # return the largest logit of each token over all positions


Request = GenerateRequest | EncodeRequest


def call_of(request: Request) -> tuple[str, str]:
    """Return the caller and the request id, which all requests of one call share."""
    return request.caller, request.request_id


@dataclass(frozen=True)
class Token:
    """A token of a target."""

    id: int
    logprob: float  # natural logarithm, before temperature, penalties and filters
    alternatives: tuple[tuple[int, float], ...]  # (id, logprob) of the top tokens, best first


@dataclass(frozen=True)
class Timings:
    """Durations of a request's phases in milliseconds."""

    queue: float
    encode: float
    decode: float


@dataclass(frozen=True)
class TokenEvent:
    """The next token of a streaming request."""

    token: Token


@dataclass(frozen=True)
class Target:
    """One generated sequence."""

    tokens: tuple[Token, ...]  # starts with the prefix; includes a generated end token
    finish_reason: FinishReason
    # Sum of the log-probabilities after the prefix, without that of a forced end; for beam search,
    # divided by length ** length_penalty. The length includes forced tokens.
    score: float
    attention: Mapping[str, NDArray[np.float32]]  # by kind, (L, H, rows, columns)


@dataclass(frozen=True)
class Generated:
    """Result of a GenerateRequest."""

    targets: tuple[Target, ...]  # best first
    timings: Timings
    num_cached_tokens: int  # prompt tokens whose states came from the prefix cache


@dataclass(frozen=True)
class Encoded:
    """Result of an EncodeRequest."""

    hidden: NDArray[np.float32]  # output of the last encoder layer, (S, M) without padding
    timings: Timings
    # Scores of the labels, as `Manifest.label_kind` defines them, or their logits: (C,), or (S, C)
    # for "tokens" and "span".
    label_scores: NDArray[np.float32] | None = None
    attention: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # by kind, (L, H, S, columns)
    predictions: NDArray[np.float32] | None = None  # logits at the predicted positions, (N, V)
    largest: NDArray[np.float32] | None = None  # largest logit of each token over all positions, (V,)


@dataclass(frozen=True)
class Failed:
    """Failure of a request."""

    code: FailureCode


@dataclass(frozen=True)
class Cancelled:
    """Final event of a cancelled request."""


Final = Generated | Encoded | Failed | Cancelled  # the last event of every request
Event = TokenEvent | Final
