"""From what a client asks to what the engine is asked: a place at the door, token ids, decoding parameters."""

import asyncio
import dataclasses
import secrets
import time

from service.calls import Call
from service.engine.request import DecodingParameters
from service.errors import ApiError
from service.schemas import MAX_SEED, Parameters, Texts
from service.serving import ServedModel
from service.tokenizer import TextTokenizer

# Tokenising this many characters takes some ten milliseconds: more of them is done away from the event loop.
INLINE_CHARACTERS = 16_384


async def read_sources(
    call: Call, model: ServedModel, inputs: Texts, *, truncate: bool = False
) -> tuple[list[tuple[int, ...]], float]:
    """Reserve a place for the inputs of a call, then tokenise them.

    Returns:
        The source ids of each input, and the milliseconds that tokenising took.

    Raises:
        ApiError: `overloaded`, or `input_too_long`.
    """
    call.record.model = model.name
    place = call.service.door(model).reserve(len(inputs.texts), call.num_bytes)
    call.resources.enter_context(place)
    started = time.perf_counter()
    limit = model.manifest.limits.max_source_tokens
    sources = await tokenize(model.source_tokenizer, inputs, limit, truncate=truncate)
    place.add_tokens(sum(map(len, sources)))
    return [tuple(source) for source in sources], 1000 * (time.perf_counter() - started)


async def tokenize(
    tokenizer: TextTokenizer, inputs: Texts, max_tokens: int, *, truncate: bool = False
) -> list[list[int]]:
    """Token ids of each text, the end token last.

    Raises:
        ApiError: `input_too_long`, unless `truncate` says to cut what is too long; the end token stays.
    """

    def run() -> list[list[int]]:
        return [_fitting(tokenizer, inputs, place, max_tokens, truncate) for place in range(len(inputs.texts))]

    if sum(map(len, inputs.texts)) <= INLINE_CHARACTERS:
        return run()
    return await asyncio.to_thread(run)


def _fitting(tokenizer: TextTokenizer, inputs: Texts, place: int, max_tokens: int, truncate: bool) -> list[int]:
    text = inputs.texts[place]
    least = 0 if truncate else tokenizer.least_tokens(text)
    if least > max_tokens:
        raise too_long(f"at least {least}", max_tokens, inputs.param(place))
    ids = tokenizer.encode(tokenizer.beginning(text, max_tokens) if truncate else text)
    if len(ids) <= max_tokens:
        return ids
    if not truncate:
        raise too_long(str(len(ids)), max_tokens, inputs.param(place))
    return [*ids[: max_tokens - 1], ids[-1]]


def too_long(found: str, limit: int, param: str) -> ApiError:
    return ApiError("input_too_long", f"It has {found} tokens; the model takes at most {limit}.", param=param)


def decoding_parameters(wanted: Parameters, model: ServedModel) -> DecodingParameters:
    """What the engine is told, a seed drawn where none was given.

    Raises:
        ApiError: the model cannot generate so many tokens.
    """
    limit = model.manifest.limits.max_target_tokens
    for name in ("max_new_tokens", "min_new_tokens"):
        if name in wanted.model_fields_set and getattr(wanted, name) > limit:
            message = f"{name} is {getattr(wanted, name)}; {model.name} generates at most {limit} tokens."
            raise ApiError("invalid_parameter", message, param=f"parameters.{name}")
    return DecodingParameters(
        # The default gives way to the model's limit and to a larger minimum.
        max_new_tokens=min(limit, max(wanted.max_new_tokens, wanted.min_new_tokens)),
        min_new_tokens=wanted.min_new_tokens,
        do_sample=wanted.do_sample,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        seed=secrets.randbelow(MAX_SEED + 1) if wanted.seed is None else wanted.seed,
    )


def of_sequence(parameters: DecodingParameters, index: int) -> DecodingParameters:
    """The parameters of input `index` of a call: each has its own seed, and so gives the same when it is sent alone."""
    return dataclasses.replace(parameters, seed=(parameters.seed + index) % (MAX_SEED + 1))
