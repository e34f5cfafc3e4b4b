"""Word alignment: links between the words of a target and the words of its source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from service.engine.request import Generated
from service.errors import ApiError
from service.fields import Texts
from service.inference.attention import check_one_sequence
from service.inference.call import Call, Ids
from service.inference.generate import (
    check_parameters,
    expected_work,
    generate_requests,
    read_prefixes,
    read_targets,
    text_of,
)
from service.inference.languages import choose_languages
from service.inference.maps import MapWriter
from service.inference.results import TimingsMs, Usage
from service.inference.service import ServedModel
from service.parameters import FORCED, NEUTRAL, AttentionSelection, GenerateParameters
from service.text.words import Word

BYTES_PER_WORD = 600  # memory of a word of a response and of its link


@dataclass(frozen=True)
class AlignInput:
    """A request for the word alignment of texts with their translations."""

    model: str | None
    inputs: Texts
    targets: Texts | None = None  # target of each input; generated if None
    parameters: GenerateParameters = NEUTRAL
    layer: int | None = None
    head: int | None = None
    source_language: str | None = None
    target_language: str | None = None


@dataclass(frozen=True)
class AlignedWord:
    """A word and its character range."""

    text: Annotated[str, Field(description="Text of the word.")]
    start: Annotated[int, Field(description="Index of its first character in the text.")]
    end: Annotated[int, Field(description="Index after its last character in the text.")]


Link = tuple[int, int, float]  # index of the source word, index of the target word, weight


@dataclass(frozen=True)
class AlignOutput:
    """The word alignment of one input."""

    index: Annotated[int, Field(description="Index of the input.")]
    text: Annotated[str, Field(description="The target: the generated or the forced text.")]
    source_words: Annotated[list[AlignedWord], Field(description="Words of the input, with ranges in the input.")]
    target_words: Annotated[list[AlignedWord], Field(description="Words of the target, with ranges in `text`.")]
    links: Annotated[
        list[Link],
        Field(
            description="For each target word: index of the source word with the largest weight, index of the target "
            "word, and the weight."
        ),
    ]
    pharaoh: Annotated[str, Field(description="The links in the Pharaoh format: `0-0 1-2`, source word first.")]
    layer: Annotated[int, Field(description="Index of the layer of the cross-attention.")]
    head: Annotated[int | None, Field(description="Index of the head; null for the mean of several heads.")]
    heads: Annotated[list[int], Field(description="Indices of the heads whose mean weights were used.")]


@dataclass(frozen=True)
class AlignResult:
    """The word alignments of a call."""

    model: Annotated[str, Field(description="Name of the model.")]
    outputs: Annotated[list[AlignOutput], Field(description="One output for each input, in order.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


async def align(call: Call, request: AlignInput) -> AlignResult:
    """Return the word alignment of each input with its target.

    A target word is linked to the source word to which it pays most attention in the selected layer
    and heads. The weights of words are those of `merge_weights`.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    model = await call.model(request.model)
    layer, heads = _choose_heads(call, model, request.layer, request.head)
    call.manifest(model.name, "generate")
    languages = choose_languages(model, request.source_language, request.target_language)
    parameters = request.parameters
    check_one_sequence(parameters, "alignment")
    check_parameters(model, parameters, len(request.inputs))
    selection = AttentionSelection(kinds=["cross"], layers=[layer], heads=heads, reduce="mean", units="words")
    maps = MapWriter(call, model, selection, languages)
    _, units = expected_work(call.service.admissions[model.name].throughput, parameters)
    sources = await call.read_sources(
        model, request.inputs, units=units, prefix=languages.source_prefix, suffix=languages.source_suffix
    )
    await maps.read_offsets(call, request.inputs, sources)
    prefixes: list[Ids] | None = None
    if request.targets is not None:
        parameters = FORCED
        prefixes = await read_targets(call, model, request.targets, sources, languages)
    elif parameters.target_prefix is not None:
        prefixes = await read_prefixes(call, model, parameters.target_prefix, sources, languages)
    num_input_tokens, num_language_tokens = sum(map(len, sources)), len(languages.target_prefix)
    call.response_memory.reserve(BYTES_PER_WORD * (num_input_tokens + sum(map(len, prefixes or ()))))
    try:
        requests = generate_requests(call, model, parameters, sources, prefixes, maps=maps, languages=languages)
        results: list[Generated] = []
        num_output_tokens: list[int] = []

        def convert(index: int, result: Generated) -> AlignOutput:
            results.append(result)
            engine_request, target = requests[index], result.targets[0]
            is_forced = target.finish_reason == "forced"
            num_known = num_language_tokens if is_forced else len(engine_request.target_prefix)
            num_output_tokens.append(len(target.tokens) - num_known)
            ids = [token.id for token in target.tokens[len(engine_request.target_prefix) :]]
            prefix = engine_request.target_prefix[num_language_tokens:]
            text = text_of(model.target_tokenizer, ids, parameters.stop, prefix)
            found = maps.word_map(index, engine_request, target, text)
            links = strongest_links(found.weights)
            return AlignOutput(
                index,
                text,
                _aligned_words(found.source_words),
                _aligned_words(found.target_words),
                links,
                " ".join([f"{source}-{word}" for source, word, _ in links]),
                layer,
                heads[0] if len(heads) == 1 else None,
                heads,
            )

        outputs = await call.gather(model, requests, Generated, convert)
    except ApiError as error:
        if error.code != "response_too_large":
            raise
        message = "The attention maps of this call are too large. Send fewer or shorter inputs in a call."
        raise ApiError("response_too_large", message) from None
    usage = Usage(num_input_tokens, sum(num_output_tokens))
    timings = call.timings(results)
    reasons = [result.targets[0].finish_reason for result in results]
    call.record_usage(model, timings, usage.input_tokens, usage.output_tokens, reasons)
    return AlignResult(model.name, outputs, usage, timings)


def _choose_heads(call: Call, model: ServedModel, layer: int | None, head: int | None) -> tuple[int, list[int]]:
    """Return the layer and the heads of a request as non-negative indices.

    Without a layer, it is that of the model's alignment. Without a head, the heads are those of the
    model's alignment, or all heads if the request has a layer.

    Raises:
        ApiError: the model has no cross-attention, or it has no such layer or head.
    """
    cross = next((one for one in model.manifest.attention if one.kind == "cross"), None)
    if cross is None:
        able = [one.name for one in call.manifests if any(kind.kind == "cross" for kind in one.attention)]
        advice = f"models that can: {', '.join(able)}" if able else "no served model has any"
        message = f"{model.name} cannot align words, because it has no cross-attention; {advice}."
        raise ApiError("unsupported_task", message, field="model")
    for field, index, count in (("layer", layer, cross.layers), ("head", head, cross.heads)):
        if index is not None and not -count <= index < count:
            message = f"It must be from {-count} to {count - 1} for cross attention, got {index}."
            raise ApiError("invalid_parameter", message, field=field)
    default_layer, default_heads = model.manifest.alignment_heads
    if layer is None and head is None:
        return default_layer, list(default_heads)
    heads = list(range(cross.heads)) if head is None else [head % cross.heads]
    return default_layer if layer is None else layer % cross.layers, heads


def strongest_links(weights: NDArray[np.float32]) -> list[Link]:
    """Return the link of each target word to the source word with the largest weight.

    Args:
        weights: (target words, source words). Of equal weights, the first counts.
    """
    if not weights.size:
        return []
    best = weights.argmax(axis=-1)
    return [(int(source), word, float(weights[word, source])) for word, source in enumerate(best)]


def _aligned_words(words: Sequence[Word]) -> list[AlignedWord]:
    return [AlignedWord(word.text, word.start, word.end) for word in words]
