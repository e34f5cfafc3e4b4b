"""POST /v1/translate: texts and markup, with all that must not change in its place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import ONE_TARGET, Inputs, ModelName
from sightline.service.body_fields import RequestBody
from sightline.service.inference.attention import check_one_sequence
from sightline.service.inference.results import Outputs
from sightline.service.inference.routing import translate_between
from sightline.service.inference.translation import NO_TERMS, TranslateOutput
from sightline.service.parameters import NEUTRAL, GenerateParameters, given_parameters
from sightline.translation.markup import MarkupKind

MAX_TERMS = 10_000
Term = Annotated[str, Field(min_length=1, max_length=200)]


class TranslationBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    markup: MarkupKind | None = Field(
        default=None,
        description="Form of the inputs, if they have tags. These are set where the words inside of them went.",
    )
    glossary: Mapping[Term, Annotated[Term, Field(pattern=r"\S")]] = Field(
        default=NO_TERMS,
        max_length=MAX_TERMS,
        description="Translations of terms: the words of a term get this translation wherever they occur. Terms "
        "without a capital also match words with capitals.",
    )
    parameters: Annotated[
        GenerateParameters, Field(description="Generation parameters of each sentence, and the languages.")
    ] = Field(
        default=NEUTRAL,
        json_schema_extra={"properties": {name: ONE_TARGET[name] for name in ONE_TARGET if name != "return_coverage"}},
    )

    EXAMPLES = (
        {"inputs": "# News\n\nWrite to jane@example.com. {name} runs."},
        {"inputs": "A <b>dog</b> runs.", "markup": "html"},
        {"inputs": "A dog runs.", "glossary": {"dog": "Rüde"}},
    )


@dataclass(frozen=True)
class TranslateResult(Outputs):
    """The translations of a call."""

    outputs: Annotated[list[TranslateOutput], Field(description="One output for each input, in order.")]


async def translate(call: Call, body: TranslationBody) -> TranslateResult:
    """Translate texts, HTML or XML, sentence by sentence.

    Line breaks, lists, code, addresses, placeholders, numbers with units and the like come back as
    they were.
    """
    check_one_sequence(body.parameters, "text", may_cover=True)
    requested = given_parameters(body.parameters)
    results, usage, timings = await translate_between(
        call, body.inputs, requested, body.model, body.markup, body.glossary
    )
    outputs = [best for best, *_ in results]
    return TranslateResult(outputs[0].route[-1].model, outputs, usage, timings)


# Long sentences are divided.
ERRORS = tuple(code for code in OUTPUT_ERRORS if code != "input_too_long")
ENDPOINTS = (Endpoint("POST", "/v1/translate", translate, TranslateResult, errors=ERRORS),)
