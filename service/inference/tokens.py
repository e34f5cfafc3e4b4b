"""Tokenization and its inverse, as the model sees texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from service.errors import ApiError
from service.fields import Texts
from service.inference.call import INLINE_CHARACTERS, Call
from service.inference.service import ServedModel
from service.text.tokenizer import TextTokenizer

Side = Literal["source", "target"]

# A token is a byte at the least, so this bounds the response; and tokenizing takes some hundred times as much memory.
MAX_TEXT_BYTES = 100_000
BYTES_PER_SPAN = 450  # that a token of a response takes
MAX_IDS = 100_000  # that a call joins: to a text of some megabytes at the most


@dataclass(frozen=True)
class TokenizeInput:
    """A request for the tokens of texts."""

    model: str | None
    inputs: Texts
    side: Side = "source"
    add_special_tokens: bool = True


@dataclass(frozen=True)
class InputToken:
    """A token with its characters in the input: `start` included, `end` not; a special token has none."""

    id: int
    text: str
    start: int
    end: int
    special: bool


@dataclass(frozen=True)
class TokenizeResult:
    """The tokens of each input."""

    model: str
    outputs: list[list[InputToken]]


@dataclass(frozen=True)
class DetokenizeInput:
    """A request for the texts of lists of token ids."""

    model: str | None
    ids: Sequence[Sequence[int]]
    side: Side = "target"
    skip_special_tokens: bool = True
    is_list: bool = True  # False for one list of ids that stands alone in the request


@dataclass(frozen=True)
class DetokenizeResult:
    """The text of each list of ids."""

    model: str
    texts: list[str]


async def tokenize(call: Call, request: TokenizeInput) -> TokenizeResult:
    """Split each input into tokens.

    Raises:
        ApiError: the request is not allowed or does not fit.
    """
    model = call.model(request.model)
    texts = request.inputs.texts
    call.reserve(model, len(texts))
    tokenizer = tokenizer_of(model, request.side)
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_TEXT_BYTES:
        message = f"The inputs have {num_bytes} bytes of text; a call splits at most {MAX_TEXT_BYTES}."
        raise ApiError("response_too_large", message)
    call.response_memory.reserve(num_bytes * BYTES_PER_SPAN)

    def run() -> list[list[InputToken]]:
        return [_tokens_of(tokenizer, text, request.add_special_tokens) for text in texts]

    is_short = sum(map(len, texts)) <= INLINE_CHARACTERS
    outputs = call.tokenize_now(run) if is_short else await call.tokenize(run)
    call.details["input_tokens"] = sum(map(len, outputs))
    return TokenizeResult(model.name, outputs)


def _tokens_of(tokenizer: TextTokenizer, text: str, add_special_tokens: bool) -> list[InputToken]:
    spans = tokenizer.encode_spans(text, add_special_tokens=add_special_tokens)
    return [InputToken(one.id, tokenizer.name(one.id), one.start, one.end, one.is_special) for one in spans]


async def detokenize(call: Call, request: DetokenizeInput) -> DetokenizeResult:
    """Join token ids to texts.

    Raises:
        ApiError: the request is not allowed or does not fit.
    """
    model = call.model(request.model)
    call.reserve(model, len(request.ids))
    tokenizer = tokenizer_of(model, request.side)
    if not request.ids:
        raise ApiError("empty_input", "The list is empty.", field="ids")
    num_ids = sum(map(len, request.ids))
    if num_ids > MAX_IDS:
        message = f"The lists have {num_ids} ids; a call joins at most {MAX_IDS}."
        raise ApiError("response_too_large", message)
    call.response_memory.reserve(num_ids * tokenizer.longest_token_bytes)

    def run() -> list[str]:
        for place, ids in enumerate(request.ids):
            _check_ids(ids, len(tokenizer), f"ids[{place}]" if request.is_list else "ids")
        return [tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens) for ids in request.ids]

    return DetokenizeResult(model.name, run() if num_ids <= INLINE_CHARACTERS else await call.tokenize(run))


def _check_ids(ids: Sequence[int], limit: int, field: str) -> None:
    if ids and max(ids) >= limit:
        place = next(place for place, id_ in enumerate(ids) if id_ >= limit)
        raise ApiError("invalid_parameter", f"A token id of this model is below {limit}.", field=field, index=place)


def tokenizer_of(model: ServedModel, side: Side) -> TextTokenizer:
    return model.source_tokenizer if side == "source" else model.target_tokenizer
