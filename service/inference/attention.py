"""Attention maps of a generation, of a forced target, or of an encoder-only model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sightline.base.text.prompt import Dialogue
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded, Generated
from sightline.service.inference.call import Call
from sightline.service.inference.generate import Decoding, check_parameters, parameters_for
from sightline.service.inference.language_choice import choose_languages
from sightline.service.inference.maps import MapWriter, TargetAttention
from sightline.service.inference.results import DecoderOutputs
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources, read_sources
from sightline.service.parameters import NEUTRAL, AttentionSelection, GenerateParameters

# Generation parameters that can be combined with targets.
TARGET_PARAMETERS = ("source_language", "target_language", "hidden_source_tokens")


@dataclass(frozen=True)
class AttentionOutput(TargetAttention):
    """Attention maps of one input and the text that they belong to."""

    index: Annotated[int, Field(description="Index of the input.")]
    text: Annotated[str, Field(description="Text that the maps belong to.")]
    finish_reason: Annotated[
        Literal["eos", "length", "stop", "forced"] | None, Field(description="Null if the model generates no text.")
    ]
    seed: Annotated[int | None, Field(description="Only with do_sample.")]


@dataclass(frozen=True)
class AttentionResult(DecoderOutputs):
    """The attention maps of a call."""

    outputs: Annotated[list[AttentionOutput], Field(description="One output for each input, in order.")]


async def attention(
    call: Call,
    model: ServedModel,
    inputs: Texts | Dialogue,
    selection: AttentionSelection,
    *,
    targets: Texts | None = None,
    parameters: GenerateParameters | None = None,
) -> AttentionResult:
    """Return the attention maps of each input.

    Without targets, the model generates a text for each input and the maps belong to it. With
    targets, the decoder is forced to produce them, and only `TARGET_PARAMETERS` count. A model
    without a decoder has only encoder maps.
    """
    if "generate" not in model.manifest.tasks:
        maps = MapWriter(call, model, selection)
        for field, value in (("targets", targets), ("parameters", parameters)):
            if value is not None:
                message = f"{model.name} does not generate text: leave out {{{field}}}."
                raise ApiError("unsupported_parameter", message, field=field)
        assert isinstance(inputs, Texts), "a model with a chat template generates text"
        return await _encoder_attention(call, model, inputs, maps)
    if isinstance(inputs, Texts) and inputs.second_texts is not None:
        message = f"It must have no pairs of texts, because {model.name} generates text from a single text."
        raise ApiError("unsupported_parameter", message, field="inputs")
    parameters = parameters or parameters_for(model, {})
    languages = choose_languages(model, parameters.source_language, parameters.target_language)
    maps = MapWriter(call, model, selection)
    check_one_sequence(parameters)
    check_parameters(model, parameters, len(inputs))
    decoding = Decoding(call, model, parameters, languages, maps)
    await decoding.read(inputs, targets)

    def convert(index: int, result: Generated) -> AttentionOutput:
        (decoded,) = decoding.targets_of(index, result)
        target, text = decoded.target, decoded.text
        target_maps = maps.write(index, decoded.request, target, text)
        return AttentionOutput(
            **vars(target_maps), index=index, text=text, finish_reason=target.finish_reason, seed=decoded.seed
        )

    return AttentionResult(model.name, *await decoding.run(convert))


async def _encoder_attention(call: Call, model: ServedModel, inputs: Texts, maps: MapWriter) -> AttentionResult:
    admitted, sources = await read_sources(call, model, inputs)
    await maps.read_offsets(call, inputs, sources)

    def convert(index: int, result: Encoded) -> AttentionOutput:
        encoder_maps = maps.write_encoded(index, result)
        return AttentionOutput(
            **vars(encoder_maps),
            target_tokens=[],
            target_offsets=[],
            decoder_input_tokens=[],
            index=index,
            text="",
            finish_reason=None,
            seed=None,
        )

    return AttentionResult(model.name, *await encode_sources(admitted, sources, convert, maps=maps))


def check_one_sequence(parameters: GenerateParameters, subject: str = "maps", *, may_cover: bool = False) -> None:
    """Check that parameters ask for one target of each input; errors name the `subject`.

    With `may_cover`, the endpoint translates by sentence, and returns their coverage and repairs.
    """
    of_coverage = ("return_coverage", "repair", "confirm_omissions")
    others = ("target_prefix", "hidden_source_tokens", "constraint") if may_cover else of_coverage
    for field in ("num_return_sequences", "top_logprobs", "return_attention", "split_sentences", *others):
        if getattr(parameters, field) not in (getattr(NEUTRAL, field), False):
            message = (
                f"This endpoint returns the {subject} of one target for each input; "
                f"use POST /v1/generate for {{{field}}}."
            )
            raise ApiError("unsupported_parameter", message, field=field)
