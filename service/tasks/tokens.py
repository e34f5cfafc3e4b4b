"""POST /v1/tokenize and /v1/detokenize, with a model's tokenizers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api.endpoint import Call, Endpoint
from sightline.service.api.types import Inputs, ModelName
from sightline.service.api_errors import ApiError, ErrorCode
from sightline.service.body_fields import MAX_INPUTS, RequestBody
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import TokenId

Side = Literal["source", "target"]

# A token has at least one byte, so this limits the number of tokens in a response. It also limits
# memory: tokenization takes about a hundred times the size of the text.
MAX_TEXT_BYTES = 100_000
BYTES_PER_SPAN = 450  # memory of one token of a response
MAX_IDS = 100_000  # limits the text of a response to a few megabytes


class TokenizeBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    side: Annotated[Side, Field(description="Tokenizer to use.")] = "source"
    add_special_tokens: Annotated[bool, Field(description="Add the special tokens that the model expects.")] = True

    EXAMPLES = ({"inputs": "A dog runs.", "side": "source"},)


class DetokenizeBody(RequestBody):
    model: ModelName = None
    ids: Annotated[
        Annotated[
            list[Annotated[list[TokenId], Field(fail_fast=True)]],
            Field(max_length=MAX_INPUTS, fail_fast=True, json_schema_extra={"minItems": 1}),
        ],
        Field(description="Lists of token ids."),
    ]
    side: Annotated[Side, Field(description="Tokenizer to use.")] = "target"
    skip_special_tokens: Annotated[bool, Field(description="Leave special tokens out of the texts.")] = True

    EXAMPLES = ({"ids": [[5, 6, 2]], "side": "target"},)


@dataclass(frozen=True)
class InputToken:
    """A token and its character range in the input; special tokens have an empty range."""

    id: Annotated[int, Field(description="Token id.")]
    text: Annotated[str, Field(description="Text of the token.")]
    start: Annotated[int, Field(description="Index of its first character in the input.")]
    end: Annotated[int, Field(description="Index after its last character in the input.")]
    special: Annotated[bool, Field(description="True for special tokens.")]


@dataclass(frozen=True)
class TokenizeResult:
    """The tokens of each input."""

    model: Annotated[str, Field(description="Name of the model.")]
    outputs: Annotated[list[list[InputToken]], Field(description="Tokens of each input, in order.")]


@dataclass(frozen=True)
class DetokenizeResult:
    """The text of each list of ids."""

    model: Annotated[str, Field(description="Name of the model.")]
    texts: Annotated[list[str], Field(description="Text of each list of ids, in order.")]


async def tokenize_texts(call: Call, body: TokenizeBody) -> TokenizeResult:
    """Split each input into tokens, each with its position in the text.

    `start` and `end` count characters of the input as it was sent; special tokens have an empty
    span.
    """
    model, texts = await call.model(body.model), body.inputs.texts
    await call.reserve(model, len(texts))
    tokenizer = tokenizer_of(model, body.side)
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_TEXT_BYTES:
        message = f"The inputs have {num_bytes} bytes of text; a call tokenizes at most {MAX_TEXT_BYTES}."
        raise ApiError("response_too_large", message)
    call.response_memory.reserve(num_bytes * BYTES_PER_SPAN)
    await call.reserve_tokens(num_bytes)

    def tokens_of(text: str) -> list[InputToken]:
        spans = tokenizer.encode_spans(text, add_special_tokens=body.add_special_tokens)
        return [InputToken(span.id, tokenizer.name(span.id), span.start, span.end, span.is_special) for span in spans]

    outputs = await call.tokenize(lambda: list(map(tokens_of, texts)), texts)
    call.details["input_tokens"] = sum(map(len, outputs))
    return TokenizeResult(model.name, outputs)


async def join_tokens(call: Call, body: DetokenizeBody) -> DetokenizeResult:
    """Join token ids to texts."""
    model, ids = await call.model(body.model), body.ids
    await call.reserve(model, len(ids), field="ids")
    tokenizer = tokenizer_of(model, body.side)
    if not ids:
        raise ApiError("empty_input", "It is an empty list.", field="ids")
    num_ids = sum(map(len, ids))
    if num_ids > MAX_IDS:
        message = f"The lists have {num_ids} ids; a call detokenizes at most {MAX_IDS}."
        raise ApiError("response_too_large", message)
    # The first call for a tokenizer looks at all of its tokens.
    longest = await call.tokenize(lambda: tokenizer.longest_token_bytes, None)
    call.response_memory.reserve(num_ids * longest)
    limit = len(tokenizer)

    def run() -> list[str]:
        for number, id_list in enumerate(ids):
            for index, id_ in enumerate(id_list):
                if id_ >= limit:
                    message = f"It must be at most {limit - 1} for this model, got {id_}."
                    raise ApiError("invalid_parameter", message, field=f"ids[{number}]", index=index)
        return [tokenizer.decode(id_list, skip_special_tokens=body.skip_special_tokens) for id_list in ids]

    return DetokenizeResult(model.name, await call.tokenize(run, ids))


def tokenizer_of(model: ServedModel, side: Side) -> TextTokenizer:
    return model.source_tokenizer if side == "source" else model.target_tokenizer


_ERRORS: tuple[ErrorCode, ...] = ("model_not_found", "empty_input", "response_too_large")
ENDPOINTS = (
    Endpoint("POST", "/v1/tokenize", tokenize_texts, TokenizeResult, errors=_ERRORS),
    Endpoint("POST", "/v1/detokenize", join_tokens, DetokenizeResult, errors=_ERRORS),
)
