"""POST /v1/translate: texts and markup, with all that must not change in its place."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sightline.base.bundle import MAX_BEAMS
from sightline.service.api.endpoint import BINARY, JSON, OUTPUT_ERRORS, WITH_FILE, Call, Endpoint, Raw, attachment
from sightline.service.api.types import ONE_COVERED_TARGET, Inputs, ModelName
from sightline.service.body_fields import File, RequestBody
from sightline.service.inference.attention import check_one_sequence
from sightline.service.inference.documents import read_file, translate_document
from sightline.service.inference.glossaries import Terms
from sightline.service.inference.results import Outputs
from sightline.service.inference.routing import translate_between
from sightline.service.inference.translation import NO_TERMS, TranslateOutput
from sightline.service.parameters import NEUTRAL, GenerateParameters, given_parameters
from sightline.translation.markup import MarkupKind, Tags


class TranslationBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    markup: MarkupKind | None = Field(
        default=None,
        description="Form of the inputs, if they have tags. These are set where the words inside of them went.",
    )
    split_tags: bool = Field(
        default=False,
        description="Let elements that only format, such as `b`, occur several times, without their ids, if the "
        "translation of their words is scattered.",
    )
    glossary: Terms = Field(
        default=NO_TERMS,
        description="Translations of terms: the words of a term get this translation where alignment finds them. Terms "
        "without a capital also match words with capitals.",
    )
    glossary_id: Annotated[
        str | None, Field(description="Id of a stored glossary, whose terms are used beside those of `glossary`.")
    ] = None
    parameters: Annotated[
        GenerateParameters, Field(description="Generation parameters of each sentence, and the languages.")
    ] = Field(
        default=NEUTRAL,
        json_schema_extra={"properties": ONE_COVERED_TARGET},
    )

    EXAMPLES = (
        {"inputs": "# News\n\nWrite to jane@example.com. {name} runs."},
        {"inputs": "A <b>dog</b> runs.", "markup": "html"},
        {"inputs": "A dog runs.", "glossary": {"dog": "Rüde"}},
    )


class DocumentBody(RequestBody):
    """A multipart form with a document."""

    file: File
    model: ModelName = None
    source_language: str | None = Field(default=None, description="BCP 47 tag, or `auto`; that of the model if absent.")
    target_language: str | None = Field(default=None, description="BCP 47 tag; that of the model if absent.")
    num_beams: int = Field(default=1, ge=1, le=MAX_BEAMS, description="Number of beams of each sentence.")
    repair: bool = Field(
        default=False,
        description="Translate sentences that omit words of the document again. The header X-Sightline-Repaired of the "
        "response has their number.",
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
    tags = None if body.markup is None else Tags(body.markup, splits_formats=body.split_tags)
    results, usage, timings = await translate_between(
        call, body.inputs, requested, body.model, tags, body.glossary, body.glossary_id
    )
    outputs = [best for best, *_ in results]
    return TranslateResult(outputs[0].route[-1].model, outputs, usage, timings)


async def translate_file(call: Call, body: DocumentBody) -> Raw:
    """Translate a document."""
    document = await read_file(call, body.file)
    requested = body.model_dump(include=body.model_fields_set - {"file", "model"}, exclude_none=True)
    translated = await translate_document(call, document, requested, body.model)
    headers = {"x-sightline-repaired": str(call.details["repaired"])} if body.repair else None
    return attachment(translated, body.file.name, headers)


# Long sentences are divided.
ERRORS = (*(code for code in OUTPUT_ERRORS if code != "input_too_long"), "not_found")
WITH_DOCUMENT = Endpoint("POST", "/v1/translate", translate_file, body_format=WITH_FILE, media_types=(BINARY,))
ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/translate",
        translate,
        TranslateResult,
        errors=ERRORS,
        media_types=(JSON, BINARY),
        with_file=WITH_DOCUMENT,
    ),
)
