"""POST /v1/tokenize and /v1/detokenize."""

from typing import Annotated

from pydantic import ConfigDict, Field

from sightline.service.api.endpoint import Call, Endpoint
from sightline.service.api.types import Inputs, ModelName
from sightline.service.api_errors import ErrorCode
from sightline.service.body_fields import MAX_INPUTS, RequestBody
from sightline.service.inference.tokens import DetokenizeResult, Side, TokenizeResult, detokenize, tokenize
from sightline.service.parameters import TokenId


class TokenizeBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    side: Annotated[Side, Field(description="Tokenizer to use.")] = "source"
    add_special_tokens: Annotated[bool, Field(description="Add the special tokens that the model expects.")] = True

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs.", "side": "source"}]})


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

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [[5, 6, 2]], "side": "target"}]})


async def tokenize_texts(call: Call, body: TokenizeBody) -> TokenizeResult:
    """Split each input into tokens, each with its position in the text.

    `start` and `end` count characters of the input as it was sent; special tokens have an empty
    span.
    """
    model = await call.model(body.model)
    return await tokenize(call, model, body.inputs, side=body.side, add_special_tokens=body.add_special_tokens)


async def join_tokens(call: Call, body: DetokenizeBody) -> DetokenizeResult:
    """Join token ids to texts."""
    model = await call.model(body.model)
    return await detokenize(call, model, body.ids, side=body.side, skip_special_tokens=body.skip_special_tokens)


_ERRORS: tuple[ErrorCode, ...] = ("model_not_found", "empty_input", "response_too_large")
ENDPOINTS = (
    Endpoint("POST", "/v1/tokenize", tokenize_texts, TokenizeResult, errors=_ERRORS),
    Endpoint("POST", "/v1/detokenize", join_tokens, DetokenizeResult, errors=_ERRORS),
)
