"""From a client's request to the engine's: admission, token ids, decoding parameters."""

import dataclasses
import secrets
from collections.abc import Sequence

from service.calls import Call
from service.engine.request import DecodingParameters, GenerateRequest
from service.errors import ApiError
from service.fields import Texts
from service.maps import MapWriter
from service.outputs import BYTES_PER_TOKEN
from service.parameters import MAX_SEED, Parameters
from service.serving import ServedModel
from service.tokenizer import StopStrings, TextStream, TextTokenizer

Ids = tuple[int, ...]

# Tokenising this many characters takes some ten milliseconds: more of them is done away from the event loop.
INLINE_CHARACTERS = 16_384


async def read_sources(
    call: Call,
    model: ServedModel,
    inputs: Texts,
    *,
    truncate: bool = False,
    parameters: DecodingParameters | None = None,
) -> list[Ids]:
    """Have the inputs of a call admitted, then tokenise them.

    Args:
        call: which call.
        model: which model.
        inputs: texts.
        truncate: cut inputs that are too long.
        parameters: how each input's target is generated; None if the inputs are only encoded.

    Returns:
        The source ids of each input, the end token last.

    Raises:
        ApiError: `overloaded`; or `input_too_long`, unless `truncate` says to cut what is too long.
    """
    throughput = call.service.admission(model).throughput
    units = 1.0 if parameters is None else throughput.generation_units(parameters, 0)
    reservation = call.reserve(model, len(inputs.texts), units * len(inputs.texts))
    limits = [model.manifest.limits.max_source_tokens] * len(inputs.texts)
    sources = await _tokenize(call, model.source_tokenizer, inputs, limits, truncate=truncate)
    reservation.add_tokens(sum(map(len, sources)))
    return sources


async def read_targets(call: Call, model: ServedModel, targets: Texts, sources: Sequence[Ids]) -> list[Ids]:
    """Target ids of each text, one for each source, the end token last.

    Raises:
        ApiError: `input_too_long`.
    """
    limits = [model.manifest.room(len(source)) for source in sources]
    return await _tokenize(call, model.target_tokenizer, targets, limits)


async def read_prefixes(call: Call, model: ServedModel, prefix: Texts | None, sources: Sequence[Ids]) -> list[Ids]:
    """The beginning of each source's target, empty where none is wanted; one string is for all inputs.

    Raises:
        ApiError: `input_too_long`; one token at the least must still fit behind it.
    """
    if prefix is None:
        return [()] * len(sources)
    limits = [model.manifest.room(len(source)) - 1 for source in sources]
    if not prefix.is_list:
        limits = [min(limits)]
    prefixes = await _tokenize(call, model.target_tokenizer, prefix, limits, add_special_tokens=False)
    return prefixes if prefix.is_list else prefixes * len(sources)


async def _tokenize(
    call: Call,
    tokenizer: TextTokenizer,
    inputs: Texts,
    limits: Sequence[int],
    *,
    truncate: bool = False,
    add_special_tokens: bool = True,
) -> list[Ids]:
    """Ids of each input, which must have no more than its limit."""

    def run() -> list[Ids]:
        ids: list[Ids] = []
        for place, max_tokens in enumerate(limits):
            if not call.seconds_left:  # nobody waits for the rest
                raise ApiError("deadline_exceeded")
            ids.append(_fitting(tokenizer, inputs, place, max_tokens, truncate, add_special_tokens))
        return ids

    with call.tokenizing():
        return await call.run_in_time(run, is_short=sum(map(len, inputs.texts)) <= INLINE_CHARACTERS)


def _fitting(
    tokenizer: TextTokenizer, inputs: Texts, place: int, max_tokens: int, truncate: bool, add_special_tokens: bool
) -> Ids:
    text = inputs.texts[place]
    least = 0 if truncate else tokenizer.least_tokens(text)
    if least > max_tokens:
        raise too_long(f"at least {least}", max_tokens, inputs.param(place))
    text = tokenizer.beginning(text, max_tokens) if truncate else text
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if len(ids) <= max_tokens:
        return tuple(ids)
    if not truncate:
        raise too_long(str(len(ids)), max_tokens, inputs.param(place))
    if tokenizer.is_special(ids[-1]):  # the end token stays
        return (*ids[: max_tokens - 1], ids[-1])
    return tuple(ids[:max_tokens])


def too_long(found: str, limit: int, param: str) -> ApiError:
    return ApiError("input_too_long", f"It has {found} tokens; the model takes at most {limit}.", param=param)


def decoding_parameters(call: Call, model: ServedModel, wanted: Parameters) -> DecodingParameters:
    """What the engine is told, a seed drawn where none was given.

    Raises:
        ApiError: more than the model or the service can do.
    """
    _check_limits(call, model, wanted)
    return DecodingParameters(
        # The default gives way to the model's limit and to a larger minimum.
        max_new_tokens=min(model.manifest.limits.max_target_tokens, max(wanted.max_new_tokens, wanted.min_new_tokens)),
        min_new_tokens=wanted.min_new_tokens,
        do_sample=wanted.do_sample,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        seed=secrets.randbelow(MAX_SEED + 1) if wanted.seed is None else wanted.seed,
        num_beams=wanted.num_beams,
        num_return_sequences=wanted.num_return_sequences,
        length_penalty=wanted.length_penalty,
        early_stopping=wanted.early_stopping,
        repetition_penalty=wanted.repetition_penalty,
        no_repeat_ngram_size=wanted.no_repeat_ngram_size,
        suppress_tokens=tuple(wanted.suppress_tokens),
        top_logprobs=wanted.top_logprobs,
    )


def _check_limits(call: Call, model: ServedModel, wanted: Parameters) -> None:
    limits = model.manifest.limits
    limit = limits.max_target_tokens
    for name in ("max_new_tokens", "min_new_tokens"):
        if name in wanted.model_fields_set and getattr(wanted, name) > limit:
            message = f"{name} is {getattr(wanted, name)}; {model.name} generates at most {limit} tokens."
            raise ApiError("invalid_parameter", message, param=f"parameters.{name}")
    max_rows = call.service.settings.max_rows
    if wanted.num_beams > max_rows:
        message = f"num_beams is {wanted.num_beams}; this service decodes at most {max_rows} rows at once."
        raise ApiError("invalid_parameter", message, param="parameters.num_beams")
    for place, token_id in enumerate(wanted.suppress_tokens):
        if token_id >= limits.vocabulary:
            message = f"A token id of this model is below {limits.vocabulary}."
            raise ApiError("invalid_parameter", message, param=f"parameters.suppress_tokens[{place}]")


def generate_requests(
    call: Call,
    model: ServedModel,
    parameters: DecodingParameters,
    sources: Sequence[Ids],
    prefixes: Sequence[Ids],
    *,
    stop: tuple[str, ...] = (),
    maps: MapWriter | None = None,
    stream: bool = False,
) -> list[GenerateRequest]:
    """One request for each source and its prefix; each has its own seed, and so gives the same when it is sent alone.

    To score a target, let it be the prefix, its end token included, and `parameters.max_new_tokens` 0.

    Raises:
        ApiError: `response_too_large` if the requested maps certainly are; `overloaded` if the responses in progress
            leave no room for this one.
    """

    def request(index: int, source: Ids, prefix: Ids) -> GenerateRequest:
        room = model.manifest.room(len(source)) - len(prefix)
        return GenerateRequest(
            request_id=call.record.request_id,
            source_ids=source,
            deadline=call.deadline,
            parameters=dataclasses.replace(
                parameters,
                seed=(parameters.seed + index) % (MAX_SEED + 1),
                max_new_tokens=min(parameters.max_new_tokens, room),
            ),
            target_prefix=prefix,
            stop=StopStrings(TextStream(model.target_tokenizer, stop, prefix)) if stop else None,
            attention=maps.kinds if maps else frozenset(),
            map_budget=maps.budget if maps else None,
            stream=stream,
        )

    requests = [
        request(index, source, prefix) for index, (source, prefix) in enumerate(zip(sources, prefixes, strict=True))
    ]
    throughput = call.service.admission(model).throughput
    num_tokens = sum(len(one.target_prefix) + throughput.expected_tokens(one.parameters) for one in requests)
    num_tokens *= parameters.num_return_sequences * (1 + parameters.top_logprobs)
    call.response_memory.reserve(int(num_tokens) * BYTES_PER_TOKEN)
    if maps:
        maps.check(requests)
    return requests
