"""POST /v1/tokenize and /v1/detokenize: what the model reads and writes, seen from outside."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.answers import DetokenizeAnswer, TokenizeAnswer
from service.calls import Call, json_answer
from service.errors import ApiError, ErrorCode
from service.inputs import INLINE_CHARACTERS
from service.routing import add_route
from service.schemas import DetokenizeBody, Side, TokenizeBody
from service.serving import ServedModel
from service.tokenizer import TextTokenizer, TokenSpan

# A token is a byte at the least, so this bounds the answer; and tokenising takes some hundred times as much memory.
MAX_TEXT_BYTES = 100_000
BYTES_PER_SPAN = 450  # that a token of a response takes; a token is a byte of text at least
MAX_IDS = 100_000  # that a call joins: to a text of some megabytes at the most


async def tokenize(body: TokenizeBody, call: Call) -> Response:
    """Split each input into tokens, each with its place in the text.

    `start` and `end` count characters of the input as it was sent; special tokens have an empty place.
    """
    return json_answer(await tokenized(body, call))


async def tokenized(body: TokenizeBody, call: Call) -> dict[str, Any]:
    """The answer, for any door."""
    model = call.service.model(body.model)
    call.reserve(model, len(body.inputs.texts))
    tokenizer = tokenizer_of(model, body.side)
    texts = body.inputs.texts
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_TEXT_BYTES:
        message = f"The inputs have {num_bytes} bytes of text; a call splits at most {MAX_TEXT_BYTES}."
        raise ApiError("response_too_large", message)
    call.response_memory.reserve(num_bytes * BYTES_PER_SPAN)

    def run() -> list[list[TokenSpan]]:
        return [tokenizer.encode_spans(text, add_special_tokens=body.add_special_tokens) for text in texts]

    spans = await call.run_in_time(run, is_short=sum(map(len, texts)) <= INLINE_CHARACTERS)
    call.record.details["input_tokens"] = sum(map(len, spans))
    return {"model": model.name, "outputs": [_named(tokenizer, one) for one in spans]}


def _named(tokenizer: TextTokenizer, spans: Sequence[TokenSpan]) -> list[dict[str, Any]]:
    return [
        {"id": one.id, "text": tokenizer.name(one.id), "start": one.start, "end": one.end, "special": one.is_special}
        for one in spans
    ]


async def detokenize(body: DetokenizeBody, call: Call) -> Response:
    """Join token ids to texts."""
    return json_answer(await detokenized(body, call))


async def detokenized(body: DetokenizeBody, call: Call) -> dict[str, Any]:
    """The answer, for any door."""
    model = call.service.model(body.model)
    call.reserve(model, len(body.ids))
    tokenizer = tokenizer_of(model, body.side)
    if not body.ids:
        raise ApiError("empty_input", "The list is empty.", param="ids")
    num_ids = sum(map(len, body.ids))
    if num_ids > MAX_IDS:
        message = f"The lists have {num_ids} ids; a call joins at most {MAX_IDS}."
        raise ApiError("response_too_large", message)
    call.response_memory.reserve(num_ids * tokenizer.longest_token_bytes)

    def run() -> list[str]:
        for place, ids in enumerate(body.ids):
            if ids and max(ids) >= len(tokenizer):
                inner = next(inner for inner, id_ in enumerate(ids) if id_ >= len(tokenizer))
                message = f"A token id of this model is below {len(tokenizer)}."
                raise ApiError("invalid_parameter", message, param=f"ids[{place}][{inner}]")
        return [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in body.ids]

    texts = await call.run_in_time(run, is_short=num_ids <= INLINE_CHARACTERS)
    return {"model": model.name, "texts": texts}


def tokenizer_of(model: ServedModel, side: Side) -> TextTokenizer:
    return model.source_tokenizer if side == "source" else model.target_tokenizer


def add_routes(app: FastAPI) -> None:
    errors: tuple[ErrorCode, ...] = ("model_not_found", "empty_input", "response_too_large")
    add_route(app, "POST", "/v1/tokenize", tokenize, TokenizeAnswer, errors=errors)
    add_route(app, "POST", "/v1/detokenize", detokenize, DetokenizeAnswer, errors=errors)
