"""Parts that the results of several use cases share."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema

from service.errors import ApiError
from service.parameters import Encoding

MAX_NUMBERS = 1_000_000  # in one response
FLOAT_BYTES = 4  # of a number in the engine's results
# Bytes that a response takes, measured and rounded up: its text, and the objects that it is written from.
BYTES_PER_NUMBER: dict[Encoding, int] = {"float": 16, "base64": 10}
BYTES_PER_TOKEN = 512  # an alternative of a token counts as a token

# Row-major: a flat array of float32, or base64 of little-endian float32.
Numbers = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]})
]


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens, special tokens included."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class TimingsMs:
    """Milliseconds that a call spent in each part. Sequences run side by side, so each is the longest of them."""

    tokenize: float
    queue: float
    encode: float
    decode: float
    total: float


@dataclass(frozen=True)
class OutputToken:
    """A token of an output."""

    id: int
    text: str
    logprob: Annotated[
        float, Field(description="Natural logarithm of its probability, before temperature, penalties and filters.")
    ]


@dataclass(frozen=True)
class RankedToken(OutputToken):
    """A token with the most probable tokens at its position."""

    alternatives: Annotated[list[OutputToken], Field(description="Best first; only with top_logprobs.")]


OutputTokens = list[OutputToken | RankedToken]


def alternatives_of(token: OutputToken) -> Sequence[OutputToken]:
    return token.alternatives if isinstance(token, RankedToken) else ()


def numbers(values: NDArray[np.float32], encoding: Encoding) -> Any:
    """Return values as `Numbers`."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    return base64.b64encode(flat.tobytes()).decode() if encoding == "base64" else flat


def check_size(subject: str, count: int, advice: str) -> None:
    """Refuse a response that would hold too many numbers.

    Args:
        subject: plural noun for the message.
        count: numbers that are certain.
        advice: a sentence on how to get a smaller response.

    Raises:
        ApiError: `response_too_large`.
    """
    if count > MAX_NUMBERS:
        message = f"The {subject} have at least {count} numbers; a response holds at most {MAX_NUMBERS}. {advice}"
        raise ApiError("response_too_large", message)
