"""POST /translate and GET /languages of LibreTranslate. The languages select the model."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from sightline.base.bundle import MAX_BEAMS
from sightline.base.text.languages import find_language, language_name
from sightline.service.api.endpoint import ENGINE_ERRORS, FORM, JSON, BodyFormat, Call, Endpoint
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import OnEmpty, RequestBody, TextsWithBlanks
from sightline.service.compat.common import SENTENCE_ERRORS
from sightline.service.inference.generate import parameters_for
from sightline.service.inference.language_choice import fitting_translators, language_pairs
from sightline.service.inference.translation import translate_documents
from sightline.translation.markup import MarkupKind

AUTO = "auto"


class TranslateBody(RequestBody):
    on_empty: OnEmpty = "error"
    inputs: Annotated[TextsWithBlanks, Field(alias="q", description="Text to translate, or a list of texts.")]
    source_language: str = Field(
        alias="source",
        description='BCP 47 tag of the language, or "auto" if only one language is translated into the target.',
    )
    target_language: str = Field(alias="target", description="BCP 47 tag of the language.")
    format: Literal["text", "html"] | None = Field(
        default=None, description="With html, tags are set where the words inside of them went."
    )
    alternatives: Annotated[int, Field(ge=0, lt=MAX_BEAMS)] | None = Field(
        default=None, description="Number of alternative translations of each text, from a beam search."
    )
    api_key: str | None = Field(default=None, description="API key, if the service needs one.")

    EXAMPLES = (
        {"q": "A dog runs.", "source": "en", "target": "de", "format": "text", "api_key": ""},
        {"q": "A <b>dog</b> runs.", "source": "en", "target": "de", "format": "html"},
        {"q": ["A dog runs.", "A man sleeps."], "source": "auto", "target": "de", "alternatives": 3},
    )


class Translation(TypedDict):
    """A translation. Both fields are lists if `q` was a list."""

    translatedText: Annotated[str | list[str], Field(description="The translation.")]
    alternatives: NotRequired[
        Annotated[list[str] | list[list[str]], Field(description="Alternative translations; only if requested.")]
    ]


class Language(TypedDict):
    code: Annotated[str, Field(description="BCP 47 tag.")]
    name: Annotated[str, Field(description="English name, or the code if the name is not known.")]
    targets: Annotated[list[str], Field(description="Codes of the target languages.")]


async def translate(call: Call, body: TranslateBody) -> Translation:
    """Translate a text, or each of a list.

    Each text is split into sentences. Its spacing and line breaks are kept, and so are addresses,
    code, placeholders, numbers with units, and words that the model does not know.
    """
    call.field_names = {**call.field_names, "num_beams": "1 + alternatives", "markup": "format"}
    name, source, target = _choose(body, call)
    model = await call.model(name, "generate")
    requested: dict[str, Any] = {"split_sentences": True, "source_language": source, "target_language": target}
    if body.alternatives:
        num_texts = 1 + body.alternatives
        num_beams = max(num_texts, parameters_for(model, {}).num_beams)
        requested |= {"num_beams": num_beams, "num_return_sequences": num_texts}
    parameters = parameters_for(model, requested)
    markup: MarkupKind | None = "html" if body.format == "html" else None
    results, _, _ = await translate_documents(call, model, body.inputs, parameters, markup)
    # Beams may differ in tokens alone.
    distinct_texts = [
        dict.fromkeys([result.text for result in of_text] if text.strip() else [""])
        for text, of_text in zip(body.inputs.texts, results, strict=True)
    ]
    translated = [next(iter(texts)) for texts in distinct_texts]
    response: Translation = {"translatedText": translated if body.inputs.is_list else translated[0]}
    if body.alternatives:
        others = [list(texts)[1:] for texts in distinct_texts]
        response["alternatives"] = others if body.inputs.is_list else others[0]
    return response


async def languages(call: Call) -> list[Language]:
    """List the languages and their target languages."""
    pairs = language_pairs(call)
    codes = sorted({*pairs, *(target for targets in pairs.values() for target in targets)})
    return [{"code": code, "name": language_name(code), "targets": pairs.get(code, [])} for code in codes]


def _choose(body: TranslateBody, call: Call) -> tuple[str, str, str]:
    """Return the name of the model of a request, its source language and its target language."""
    is_auto = body.source_language == AUTO
    fitting = fitting_translators(call, None if is_auto else body.source_language, body.target_language)
    languages, manifest = fitting[0]
    if not is_auto:
        return manifest.name, body.source_language, body.target_language
    sources = {source for pair, _ in fitting for source in pair.sources}
    if len(sources) > 1:
        sources.discard(find_language(body.target_language, languages.targets) or "")
    if len(sources) > 1:
        message = "It must name a language: languages are not detected, and several have this target."
        raise ApiError("unsupported_parameter", message, path="source")
    return manifest.name, sources.pop(), body.target_language


ENDPOINTS = (
    Endpoint(
        "POST",
        "/translate",
        translate,
        Translation,
        errors=(*ENGINE_ERRORS, "response_too_large"),
        error_format=SENTENCE_ERRORS,
        body_format=BodyFormat((JSON, FORM)),
        key_field="api_key",
    ),
    Endpoint("GET", "/languages", languages, list[Language], errors=("loading",), error_format=SENTENCE_ERRORS),
)
