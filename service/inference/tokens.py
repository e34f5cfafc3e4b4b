"""Tokenization and detokenization with a model's tokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.inference.call import Call
from sightline.service.inference.service import ServedModel

Side = Literal["source", "target"]

# A token has at least one byte, so this limits the number of tokens in a response. It also limits
# memory: tokenization takes about a hundred times the size of the text.
MAX_TEXT_BYTES = 100_000
BYTES_PER_SPAN = 450  # memory of one token of a response
MAX_IDS = 100_000  # limits the text of a response to a few megabytes


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


async def tokenize(
    call: Call, model: ServedModel, inputs: Texts, *, side: Side = "source", add_special_tokens: bool = True
) -> TokenizeResult:
    texts = inputs.texts
    await call.reserve(model, len(texts))
    tokenizer = tokenizer_of(model, side)
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_TEXT_BYTES:
        message = f"The inputs have {num_bytes} bytes of text; a call tokenizes at most {MAX_TEXT_BYTES}."
        raise ApiError("response_too_large", message)
    call.response_memory.reserve(num_bytes * BYTES_PER_SPAN)
    await call.reserve_tokens(num_bytes)

    def run() -> list[list[InputToken]]:
        return [_tokens_of(tokenizer, text, add_special_tokens) for text in texts]

    outputs = await call.tokenize(run, texts)
    call.details["input_tokens"] = sum(map(len, outputs))
    return TokenizeResult(model.name, outputs)


def _tokens_of(tokenizer: TextTokenizer, text: str, add_special_tokens: bool) -> list[InputToken]:
    spans = tokenizer.encode_spans(text, add_special_tokens=add_special_tokens)
    return [InputToken(span.id, tokenizer.name(span.id), span.start, span.end, span.is_special) for span in spans]


async def detokenize(
    call: Call,
    model: ServedModel,
    ids: Sequence[Sequence[int]],
    *,
    side: Side,
    skip_special_tokens: bool,
    is_list: bool = True,
) -> DetokenizeResult:
    """Convert lists of token ids to texts; `is_list` is False for one flat list, for errors."""
    await call.reserve(model, len(ids), field="ids")
    tokenizer = tokenizer_of(model, side)
    if not ids:
        raise ApiError("empty_input", "It is an empty list.", field="ids")
    num_ids = sum(map(len, ids))
    if num_ids > MAX_IDS:
        message = f"The lists have {num_ids} ids; a call detokenizes at most {MAX_IDS}."
        raise ApiError("response_too_large", message)
    call.response_memory.reserve(num_ids * tokenizer.longest_token_bytes)

    def run() -> list[str]:
        for index, id_list in enumerate(ids):
            _check_ids(id_list, len(tokenizer), f"ids[{index}]" if is_list else "ids")
        return [tokenizer.decode(id_list, skip_special_tokens=skip_special_tokens) for id_list in ids]

    return DetokenizeResult(model.name, await call.tokenize(run, ids))


def _check_ids(ids: Sequence[int], limit: int, field: str) -> None:
    if ids and max(ids) >= limit:
        index = next(index for index, id_ in enumerate(ids) if id_ >= limit)
        raise ApiError(
            "invalid_parameter",
            f"It must be at most {limit - 1} for this model, got {ids[index]}.",
            field=field,
            index=index,
        )


def only_id(ids: Sequence[int], field: str, index: int | None, advice: str = "") -> int:
    """Return the id of a word that must be a single token; `advice` ends the error's message."""
    if len(ids) != 1:
        message = f"It is {len(ids)} tokens of this model, and must be one. POST /v1/tokenize shows the tokens{advice}."
        raise ApiError("invalid_parameter", message, field=field, index=index)
    return ids[0]


def tokenizer_of(model: ServedModel, side: Side) -> TextTokenizer:
    return model.source_tokenizer if side == "source" else model.target_tokenizer
