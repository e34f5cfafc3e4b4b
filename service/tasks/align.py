"""POST /v1/align: links between the words of a target and the words of its source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from sightline.base.bundle import AlignmentStep
from sightline.base.text.words import Word
from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import ONE_TARGET, Inputs, ModelName, check_targets
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import NULL, RequestBody, field_error
from sightline.service.engine.request import Generated
from sightline.service.inference.attention import check_one_sequence
from sightline.service.inference.generate import Decoding, check_parameters, parameters_for
from sightline.service.inference.language_choice import choose_languages, generating_model
from sightline.service.inference.maps import MapWriter
from sightline.service.inference.results import Outputs
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import (
    NEUTRAL,
    AttentionSelection,
    GenerateParameters,
    HeadIndex,
    Language,
    given_parameters,
)
from sightline.translation.alignment import shared

BYTES_PER_WORD = 600  # memory of a word of a response and of its link

# The languages are fields of the body, so that they can be combined with `targets`.
LANGUAGE_FIELDS = ("source_language", "target_language")


class AlignBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    targets: Annotated[
        Inputs | None,
        Field(
            description="Target of each input, instead of generated text: one string, or a list as long as `inputs`."
        ),
    ] = None
    step: Annotated[
        AlignmentStep | None,
        Field(
            description="Decoder step whose weights belong to a target token: the one that writes it, or the one that "
            "reads it. If absent, that of the model's `alignment`; `writes` with `layer`."
        ),
    ] = None
    layer: Annotated[
        HeadIndex | None,
        Field(description="Layer of the cross-attention; -1 is the last. If absent, that of the model's `alignment`."),
    ] = None
    head: Annotated[
        HeadIndex | None,
        Field(
            description="Head of the layer; -1 is the last. If absent, the mean over all heads of `layer`; without "
            "`layer`, the heads of the model's `alignment`."
        ),
    ] = None
    return_weights: Annotated[
        bool, Field(description="Return the weights of the step between all words, not only the links.")
    ] = False
    source_language: Language | None = None
    target_language: Language | None = None
    parameters: Annotated[
        GenerateParameters, Field(description="Generation parameters; not allowed together with `targets`.")
    ] = Field(default=NEUTRAL, json_schema_extra={"properties": {**ONE_TARGET, **dict.fromkeys(LANGUAGE_FIELDS, NULL)}})

    EXAMPLES = (
        {"inputs": "A dog runs."},
        {"inputs": "A dog runs.", "targets": "Ein Hund rennt.", "layer": -1},
        {"inputs": ["A dog runs.", "A cat."], "parameters": {"num_beams": 4}},
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        for name in LANGUAGE_FIELDS:
            if getattr(self.parameters, name) is not None:
                message = f"parameters.{name} is not supported here: use {name} beside inputs."
                raise field_error("unsupported_parameter", message, "parameters", name)
        if self.targets is not None:
            check_targets(self.inputs, self.targets)
            if "parameters" in self.model_fields_set:
                message = "parameters cannot be combined with targets: nothing is generated."
                raise field_error("invalid_parameter", message, "parameters")
        return self


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
            description="For each target word: index of the source word with the largest share, index of the target "
            "word, and the weight. A target word without weights has no link."
        ),
    ]
    pharaoh: Annotated[str, Field(description="The links in the Pharaoh format: `0-0 1-2`, source word first.")]
    step: Annotated[
        AlignmentStep,
        Field(description="Decoder step whose weights were used: the one that writes a target token, or reads it."),
    ]
    layer: Annotated[int, Field(description="Index of the layer of the cross-attention.")]
    head: Annotated[int | None, Field(description="Index of the head; null for the mean of several heads.")]
    heads: Annotated[list[int], Field(description="Indices of the heads whose mean weights were used.")]
    weights: Annotated[
        list[list[float]] | None,
        Field(description="Weights of each target word to all source words; only with return_weights."),
    ]


@dataclass(frozen=True)
class AlignResult(Outputs):
    """The word alignments of a call."""

    outputs: Annotated[list[AlignOutput], Field(description="One output for each input, in order.")]


async def align_words(call: Call, body: AlignBody) -> AlignResult:
    """Align the words of each input with the words of its translation.

    Without `targets`, the model translates the inputs. Each word of the target is linked to the
    source word with the largest share of the cross-attention of the chosen layer and heads.
    """
    named = body.source_language, body.target_language
    if named != (None, None):
        model = await generating_model(call, body.model, *named)
    else:
        model = await call.model(body.model, default_for="generate")
    parameters = NEUTRAL
    if body.targets is None and "generate" in model.manifest.tasks:
        parameters = parameters_for(model, given_parameters(body.parameters))
    layer, heads = _choose_heads(call, model, body.layer, body.head)
    step = body.step
    if step is None:
        step = model.manifest.alignment_heads[0] if body.layer is None else "writes"
    await call.model(model.name, "generate")  # rejects other models
    languages = choose_languages(model, *named)
    check_one_sequence(parameters, "alignment")
    check_parameters(model, parameters, len(body.inputs))
    selection = AttentionSelection(kinds=["cross"], layers=[layer], heads=heads, reduce="mean", units="words")
    maps = MapWriter(call, model, selection, step=step)
    decoding = Decoding(call, model, parameters, languages, maps)

    def convert(index: int, result: Generated) -> AlignOutput:
        (decoded,) = decoding.targets_of(index, result)
        word_map = maps.word_map(index, decoded.request, decoded.target, decoded.text)
        links = strongest_links(word_map.weights)
        return AlignOutput(
            index,
            decoded.text,
            _aligned_words(word_map.source_words),
            _aligned_words(word_map.target_words),
            links,
            " ".join([f"{source}-{word}" for source, word, _ in links]),
            step,
            layer,
            heads[0] if len(heads) == 1 else None,
            heads,
            word_map.weights.tolist() if body.return_weights else None,
        )

    try:
        await decoding.read(body.inputs, body.targets)
        num_target_tokens = sum([len(request.target_prefix) - request.num_forced for request in decoding.requests])
        call.response_memory.reserve(BYTES_PER_WORD * (decoding.num_input_tokens + num_target_tokens))
        return AlignResult(model.name, *await decoding.run(convert))
    except ApiError as error:
        if error.code != "response_too_large":
            raise
        message = "The attention maps of this call are too large. Send fewer or shorter inputs in a call."
        raise ApiError("response_too_large", message) from None


def _choose_heads(call: Call, model: ServedModel, layer: int | None, head: int | None) -> tuple[int, list[int]]:
    """Return the layer and the heads of a request as non-negative indices.

    Without a layer, it is that of the model's alignment. Without a head, the heads are those of the
    model's alignment, or all heads if the request has a layer.
    """
    cross = model.manifest.cross_attention
    if cross is None:
        manifests = call.service.require_manifests()
        able = [manifest.name for manifest in manifests if manifest.cross_attention is not None]
        advice = f"models that can: {', '.join(able)}" if able else "no served model has any"
        message = f"{model.name} cannot align words, because it has no cross-attention; {advice}."
        raise ApiError("unsupported_task", message, field="model")
    for field, index, count in (("layer", layer, cross.layers), ("head", head, cross.heads)):
        if index is not None and not -count <= index < count:
            message = f"It must be from {-count} to {count - 1} for cross attention, got {index}."
            raise ApiError("invalid_parameter", message, field=field)
    _, default_layer, default_heads = model.manifest.alignment_heads
    if layer is None and head is None:
        return default_layer, list(default_heads)
    heads = list(range(cross.heads)) if head is None else [head % cross.heads]
    return default_layer if layer is None else layer % cross.layers, heads


def strongest_links(weights: NDArray[np.float32]) -> list[Link]:
    """Return the link of each target word to the source word with the largest share.

    `weights` are (target words, source words); see `shared`. A target word without weights has no
    link. Of equal shares, the first counts.
    """
    if not weights.size:
        return []
    best = shared(weights).argmax(axis=-1)
    return [
        (int(source), word, float(weights[word, source])) for word, source in enumerate(best) if weights[word].any()
    ]


def _aligned_words(words: Sequence[Word]) -> list[AlignedWord]:
    return [AlignedWord(word.text, word.start, word.end) for word in words]


ENDPOINTS = (Endpoint("POST", "/v1/align", align_words, AlignResult, errors=OUTPUT_ERRORS),)
