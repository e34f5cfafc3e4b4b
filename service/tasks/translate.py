"""POST /v1/translate: texts and markup, with all that must not change in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import ONE_TARGET, Inputs, ModelName
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody
from sightline.service.inference.attention import check_one_sequence
from sightline.service.inference.generate import parameters_for
from sightline.service.inference.language_choice import generating_model
from sightline.service.inference.results import Outputs
from sightline.service.inference.translation import PlacedTag, translate_documents
from sightline.service.parameters import NEUTRAL, GenerateParameters, given_parameters
from sightline.translation.markup import MarkupKind


class TranslationBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    markup: MarkupKind | None = Field(
        default=None,
        description="Form of the inputs, if they have tags. These are set where the words inside of them went.",
    )
    parameters: Annotated[
        GenerateParameters, Field(description="Generation parameters of each sentence, and the languages.")
    ] = Field(default=NEUTRAL, json_schema_extra={"properties": ONE_TARGET})

    EXAMPLES = (
        {"inputs": "# News\n\nWrite to jane@example.com. {name} runs."},
        {"inputs": "A <b>dog</b> runs.", "markup": "html"},
    )


@dataclass(frozen=True)
class TranslateOutput:
    """The translation of an input."""

    index: Annotated[int, Field(description="Index of the input.")]
    text: Annotated[str, Field(description="The translation.")]
    tags: Annotated[
        Sequence[PlacedTag], Field(description="Elements inside of sentences, in their order in the input.")
    ]


@dataclass(frozen=True)
class TranslateResult(Outputs):
    """The translations of a call."""

    outputs: Annotated[list[TranslateOutput], Field(description="One output for each input, in order.")]


async def translate(call: Call, body: TranslationBody) -> TranslateResult:
    """Translate texts, HTML or XML, sentence by sentence.

    Line breaks, lists, code, addresses, placeholders, numbers with units and the like come back as
    they were.
    """
    named = body.parameters.source_language, body.parameters.target_language
    model = await generating_model(call, body.model, *named)
    if not model.translates:
        message = f"{model.name} does not translate; GET /v1/models lists the languages of models that do."
        raise ApiError("unsupported_task", message, field="model")
    check_one_sequence(body.parameters, "text")
    parameters = parameters_for(model, {**given_parameters(body.parameters), "split_sentences": True})
    results, usage, timings = await translate_documents(call, model, body.inputs, parameters, body.markup)
    outputs = [TranslateOutput(index, best.text, best.tags) for index, (best, *_) in enumerate(results)]
    return TranslateResult(model.name, outputs, usage, timings)


# Long sentences are divided.
ERRORS = tuple(code for code in OUTPUT_ERRORS if code != "input_too_long")
ENDPOINTS = (Endpoint("POST", "/v1/translate", translate, TranslateResult, errors=ERRORS),)
