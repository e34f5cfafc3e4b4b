"""The pipeline of the use cases that run only the encoder."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded, EncodeRequest
from sightline.service.inference.call import Call, Ids, check_characters, tokenize_within_limits
from sightline.service.inference.language_choice import choose_languages
from sightline.service.inference.maps import MapWriter
from sightline.service.inference.results import FLOAT_BYTES, TimingsMs, Usage
from sightline.service.inference.service import ServedModel

T = TypeVar("T")


async def read_sources(
    call: Call,
    model: ServedModel,
    inputs: Texts,
    field: str = "inputs",
    *,
    truncate: bool = False,
    instruction: str | None = None,
    cuts_first: bool = False,
    mask_id: int | None = None,
    partner: str | None = None,
) -> list[Ids]:
    """Reserve the call's share of a model's limits, then tokenize the inputs.

    A translation model reads the tokens of its default languages around each input. `instruction`
    replaces that of a reranker's template. For other options, see `tokenize_within_limits`.
    """
    if any(text is not None for text in inputs.second_texts or ()) and not model.manifest.reads_pairs:
        message = f"{model.name} reads no pairs of texts, because its tokenizer has no form of them; send single texts."
        raise ApiError("unsupported_parameter", message, field=field)
    count, template = len(inputs.texts), model.manifest.pair_template
    if instruction is not None:
        if template is None or not template.has_instruction:
            message = f"{model.name} has no instruction; leave {{instruction}} out."
            raise ApiError("unsupported_parameter", message, field="instruction")
        check_characters(len(instruction), model.manifest.limits.max_source_tokens, "instruction", None)
        template = template.model_copy(update={"instruction": instruction})
    await call.reserve(model, count, count, field)
    languages = choose_languages(model, None, None)
    before, after = languages.source_prefix, languages.source_suffix
    limits = [model.manifest.limits.max_source_tokens - len(before) - len(after)] * count
    tokenizer, deadline = model.source_tokenizer, call.deadline
    options: dict[str, Any] = {
        "truncate": truncate,
        "cuts_first": cuts_first,
        "pair_template": template,
        "mask_id": mask_id,
        "way_out": ", or set {truncate} to true" if "truncate" in call.field_names and not truncate else "",
        **({} if partner is None else {"partner": partner}),
    }
    work = partial(tokenize_within_limits, tokenizer, inputs, field, limits, deadline, **options)
    second_texts = [text for text in inputs.second_texts or () if text]
    sources = await call.tokenize(work, (*inputs.texts, *second_texts))
    if before or after:
        sources = [(*before, *source, *after) for source in sources]
    assert call.controller is not None and call.reservation is not None
    num_tokens = sum(map(len, sources))
    call.controller.add_tokens(call.reservation, num_tokens)
    await call.reserve_tokens(num_tokens)
    return sources


async def encode_sources(
    call: Call,
    model: ServedModel,
    sources: Sequence[Ids],
    convert: Callable[[int, Encoded], T],
    *,
    return_labels: bool = False,
    return_logits: bool = False,
    maps: MapWriter | None = None,
    predicted: Sequence[tuple[int, ...]] | None = None,
    return_largest: bool = False,
) -> tuple[list[T], Usage, TimingsMs]:
    """Run the encoder over each source, and record the usage of the call.

    Args:
        convert: makes an output of the index of an input and its result; outputs keep the order.
        return_logits: return the logits of labels in place of their scores.
        maps: the attention maps of the response, after `MapWriter.read_offsets`.
        predicted: for each input, the positions whose logits of tokens are returned.
        return_largest: return the largest logit of each token over all positions.
    """
    kinds = maps.kinds if maps else frozenset[str]()
    requests = [
        EncodeRequest(
            call.request_id,
            source,
            call.deadline,
            return_labels,
            kinds,
            call.caller,
            return_logits,
            positions,
            return_largest,
        )
        for source, positions in zip(sources, predicted or [()] * len(sources), strict=True)
    ]
    if maps:
        maps.check(requests)
    usage = Usage(sum(map(len, sources)), 0)
    assert call.reservation is not None
    at_once = sorted(map(len, sources))[-call.reservation.num_sequences :]  # inputs in the engine, at most
    call.response_memory.reserve(FLOAT_BYTES * model.hidden_size * sum(at_once))
    outputs, times = await call.submit(model, requests).gather(convert)
    timings = call.timings(times)
    call.record_usage(model, timings, usage.input_tokens, 0)
    return outputs, usage, timings
