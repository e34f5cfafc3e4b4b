"""POST /v1/translate: texts and markup, with all that must not change in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import ONE_TARGET, Inputs, ModelName
from sightline.service.body_fields import RequestBody
from sightline.service.inference.attention import check_one_sequence
from sightline.service.inference.results import Outputs
from sightline.service.inference.routing import DetectedLanguage, translate_between
from sightline.service.inference.translation import PlacedTag
from sightline.service.parameters import NEUTRAL, GenerateParameters, given_parameters
from sightline.translation.markup import MarkupKind
from sightline.translation.routes import Step


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
    detected: Annotated[DetectedLanguage | None, Field(description="Language of the input, if the call has `auto`.")]
    route: Annotated[
        Sequence[Step], Field(description="Models that translated one after the other, with their languages.")
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
    check_one_sequence(body.parameters, "text")
    requested = given_parameters(body.parameters)
    results, usage, timings = await translate_between(call, body.inputs, requested, body.model, body.markup)
    outputs = [
        TranslateOutput(index, result.documents[0].text, result.documents[0].tags, result.detected, result.route)
        for index, result in enumerate(results)
    ]
    return TranslateResult(results[0].route[-1].model, outputs, usage, timings)


# Long sentences are divided.
ERRORS = tuple(code for code in OUTPUT_ERRORS if code != "input_too_long")
ENDPOINTS = (Endpoint("POST", "/v1/translate", translate, TranslateResult, errors=ERRORS),)
