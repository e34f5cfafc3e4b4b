"""Types that the results of several use cases share."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema

from sightline.service.api_errors import ApiError
from sightline.service.parameters import Encoding

MAX_NUMBERS = 1_000_000  # maximum of embedding or attention values in one response
FLOAT_BYTES = 4  # size of a number in the engine's results
# Memory of a response, measured and rounded up: the objects, and the text made from them.
BYTES_PER_NUMBER: dict[Encoding, int] = {"float": 16, "base64": 10}
BYTES_PER_TOKEN = 512  # each alternative of a token counts as a token

# Row-major: a flat array of float32, or base64 of little-endian float32.
Numbers = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]})
]


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens, special tokens included."""

    input_tokens: Annotated[int, Field(description="Tokens of the inputs.")]
    output_tokens: Annotated[int, Field(description="Tokens of the outputs.")]


@dataclass(frozen=True)
class CachedUsage(Usage):
    """Numbers of tokens of a decoder-only model, which may have a prefix cache."""

    cached_tokens: Annotated[int, Field(description="Tokens of the inputs whose states came from the prefix cache.")]


@dataclass(frozen=True)
class TimingsMs:
    """Duration of each phase of a call in milliseconds.

    Sequences run concurrently, so each duration is the maximum over the sequences.
    """

    tokenize: Annotated[float, Field(description="Tokenization.")]
    queue: Annotated[float, Field(description="Waiting in the queue.")]
    encode: Annotated[float, Field(description="Encoder.")]
    decode: Annotated[float, Field(description="Decoder.")]
    total: Annotated[float, Field(description="Whole call.")]


@dataclass(frozen=True)
class Outputs:
    """The outputs of a call. Each use case narrows their type."""

    model: Annotated[str, Field(description="Name of the model.")]
    outputs: Annotated[Sequence[Any], Field(description="One output for each input, in order.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


@dataclass(frozen=True)
class DecoderOutputs(Outputs):
    """The outputs of a call that runs the decoder."""

    usage: Annotated[Usage | CachedUsage, Field(description="Token counts.")]


@dataclass(frozen=True)
class OutputToken:
    """A token of an output."""

    id: Annotated[int, Field(description="Token id.")]
    text: Annotated[str, Field(description="Text of the token.")]
    logprob: Annotated[
        float,
        Field(
            description="Natural logarithm of the probability, before temperature, penalties and filters. It is "
            "relative to the candidates if the model has a shortlist and the request uses it, see `/v1/models/{id}`."
        ),
    ]


@dataclass(frozen=True)
class RankedToken(OutputToken):
    """A token with the top alternatives at its position."""

    alternatives: Annotated[
        list[OutputToken], Field(description="Most probable tokens, best first; only with top_logprobs.")
    ]


OutputTokens = list[OutputToken | RankedToken]


def alternatives_of(token: OutputToken) -> Sequence[OutputToken]:
    return token.alternatives if isinstance(token, RankedToken) else ()


def numbers(values: NDArray[np.float32], encoding: Encoding) -> Any:
    """Return values as `Numbers`."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    return base64.b64encode(flat.tobytes()).decode() if encoding == "base64" else flat


def check_size(subject: str, count: int, advice: str) -> None:
    """Reject a response of too many numbers; `subject` is a plural noun for the message."""
    if count > MAX_NUMBERS:
        message = f"The {subject} have at least {count} numbers; a response holds at most {MAX_NUMBERS}. {advice}"
        raise ApiError("response_too_large", message)
