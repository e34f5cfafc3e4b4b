"""The pipeline of the use cases that run only the encoder."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Literal, TypeVar

from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded, EncodeRequest
from sightline.service.inference.call import (
    AdmittedCall,
    Call,
    Ids,
    SingleText,
    TextPair,
    check_characters,
    tokenize_within_limits,
)
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
    cut: Literal["first", "longest"] = "longest",
    mask_id: int | None = None,
    partner: str = "the other text of its pair",
) -> tuple[AdmittedCall, list[Ids]]:
    """Reserve the call's share of a model's limits, then tokenize the inputs.

    A translation model reads the tokens of its default languages around each input. `instruction`
    replaces that of a reranker's template. With `truncate`, texts that are too long are cut: of a
    pair, the one that `cut` names. `mask_id` is a token that texts have by its name; `partner` is
    the name of the second text of a pair, for errors.
    """
    if any(text is not None for text in inputs.second_texts or ()) and not model.manifest.reads_pairs:
        message = f"{model.name} reads no pairs of texts, because its tokenizer has no form of them; send single texts."
        raise ApiError("unsupported_parameter", message, field=field)
    count, template = len(inputs.texts), model.manifest.pair_template
    if instruction is not None:
        if template is None or "{instruction}" not in template.text:
            message = f"{model.name} has no instruction; leave {{instruction}} out."
            raise ApiError("unsupported_parameter", message, field="instruction")
        check_characters(len(instruction), model.manifest.limits.max_source_tokens, "instruction", None)
        template = template.model_copy(update={"instruction": instruction})
    admitted = await call.reserve(model, count, count, field)
    languages = choose_languages(model, None, None)
    before, after = languages.source_prefix, languages.source_suffix
    limits = [model.manifest.limits.max_source_tokens - len(before) - len(after)] * count
    tokenizer, deadline = model.source_tokenizer, call.deadline
    way_out = ", or set {truncate} to true" if "truncate" in call.field_names and not truncate else ""
    items = [
        SingleText(text, truncate, mask_id)
        if second is None
        else TextPair(text, second, partner, cut if truncate else "none", template)
        for text, second in zip(inputs.texts, inputs.second_texts or repeat(None, count), strict=True)
    ]
    work = partial(tokenize_within_limits, tokenizer, items, inputs.index, field, limits, deadline, way_out)
    second_texts = [text for text in inputs.second_texts or () if text]
    sources = await call.tokenize(work, (*inputs.texts, *second_texts))
    if before or after:
        sources = [(*before, *source, *after) for source in sources]
    num_tokens = sum(map(len, sources))
    admitted.controller.add_tokens(admitted.reservation, num_tokens)
    await call.reserve_tokens(num_tokens)
    return admitted, sources


async def encode_sources(
    admitted: AdmittedCall,
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
    call, model = admitted.call, admitted.model
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
    at_once = sorted(map(len, sources))[-admitted.reservation.num_sequences :]  # inputs in the engine, at most
    call.response_memory.reserve(FLOAT_BYTES * model.hidden_size * sum(at_once))
    outputs, times = await admitted.submit(requests).gather(convert)
    timings = call.timings(times)
    call.record_usage(model, timings, usage.input_tokens, 0)
    return outputs, usage, timings
