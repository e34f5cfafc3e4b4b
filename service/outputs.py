"""From what the engine gives to what a client reads: texts, tokens by name, numbers as lists or base64."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.request import GenerateRequest, Target, Token
from service.errors import ApiError
from service.parameters import Encoding
from service.tokenizer import TextStream, TextTokenizer

MAX_NUMBERS = 1_000_000  # in one answer
# Bytes that a response takes, measured and rounded up: its text, and the objects that it is written from.
BYTES_PER_NUMBER: Mapping[Encoding, int] = {"float": 16, "base64": 10}
BYTES_PER_TOKEN = 512  # an alternative of a token counts as a token


def text_of(tokenizer: TextTokenizer, ids: Iterable[int], stop: Sequence[str] = (), prefix: Sequence[int] = ()) -> str:
    """The text of a prefix and what was generated after it, cut before the stop string that ended it.

    It is what the pieces of a stream join to.
    """
    stream = TextStream(tokenizer, stop, prefix)
    pieces = [stream.push(id_) for id_ in ids]
    return "".join(pieces) + stream.finish()


def text_of_target(tokenizer: TextTokenizer, request: GenerateRequest, target: Target, stop: Sequence[str]) -> str:
    ids = (token.id for token in generated_tokens(request, target))
    return text_of(tokenizer, ids, stop, request.target_prefix)


def generated_tokens(request: GenerateRequest, target: Target) -> tuple[Token, ...]:
    """A target's tokens without those of its prefix."""
    return target.tokens[len(request.target_prefix) :]


def token_of(tokenizer: TextTokenizer, token: Token) -> dict[str, Any]:
    """A token as it stands in an answer."""
    answer: dict[str, Any] = {"id": token.id, "text": tokenizer.name(token.id), "logprob": token.logprob}
    if token.alternatives:
        answer["alternatives"] = [
            {"id": id_, "text": tokenizer.name(id_), "logprob": logprob} for id_, logprob in token.alternatives
        ]
    return answer


def output_of(
    tokenizer: TextTokenizer, request: GenerateRequest, target: Target, stop: Sequence[str]
) -> dict[str, Any]:
    """One generated sequence as it stands in an answer."""
    output: dict[str, Any] = {
        "text": text_of_target(tokenizer, request, target, stop),
        "tokens": [token_of(tokenizer, token) for token in generated_tokens(request, target)],
        "finish_reason": target.finish_reason,
        "score": target.score,
    }
    return output | seed_of(request)


def seed_of(request: GenerateRequest) -> dict[str, int]:
    """The seed as it stands in an answer: only where it was used."""
    return {"seed": request.parameters.seed} if request.parameters.do_sample else {}


def numbers(values: NDArray[np.float32], encoding: Encoding) -> Any:
    """Row-major: a flat array for the JSON writer, or base64 of little-endian float32."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    return base64.b64encode(flat.tobytes()).decode() if encoding == "base64" else flat


def check_size(what: str, count: int, way_out: str) -> None:
    """Raise ApiError where an answer would carry too many numbers; `count` of them are certain."""
    if count > MAX_NUMBERS:
        message = f"The {what} have at least {count} numbers; an answer carries at most {MAX_NUMBERS}. {way_out}"
        raise ApiError("response_too_large", message)
