"""From what the engine gives to what a client reads: texts, tokens by name, numbers as lists or base64."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.request import Generated, GenerateRequest, Token
from service.errors import ApiError
from service.schemas import Encoding
from service.serving import ServedModel
from service.tokenizer import TextStream, TextTokenizer

MAX_NUMBERS = 1_000_000  # in one answer


def text_of(tokenizer: TextTokenizer, ids: Iterable[int], stop: Sequence[str] = ()) -> str:
    """The text of generated tokens, cut before the stop string that ended it: what the pieces of a stream join to."""
    stream = TextStream(tokenizer, stop)
    pieces = [stream.push(id_) for id_ in ids]
    return "".join(pieces) + stream.finish()


def token_of(tokenizer: TextTokenizer, token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": tokenizer.name(token.id), "logprob": token.logprob}


def output_of(model: ServedModel, request: GenerateRequest, result: Generated, stop: Sequence[str]) -> dict[str, Any]:
    """One generation as it stands in an answer."""
    tokenizer = model.target_tokenizer
    output: dict[str, Any] = {
        "text": text_of(tokenizer, (token.id for token in result.tokens), stop),
        "tokens": [token_of(tokenizer, token) for token in result.tokens],
        "finish_reason": result.finish_reason,
        "score": result.score,
    }
    if request.parameters.do_sample:
        output["seed"] = request.parameters.seed
    return output


def numbers(values: NDArray[np.float32], encoding: Encoding) -> Any:
    """Row-major: a flat array for the JSON writer, or base64 of little-endian float32."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    return base64.b64encode(flat.tobytes()).decode() if encoding == "base64" else flat


def check_size(what: str, count: int, way_out: str) -> None:
    """Raise ApiError where an answer would carry too many numbers."""
    if count > MAX_NUMBERS:
        message = f"The {what} have {count} numbers; an answer carries at most {MAX_NUMBERS}. {way_out}"
        raise ApiError("response_too_large", message)
