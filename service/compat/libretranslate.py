"""Routes of LibreTranslate: translation, detection and languages, which select the models."""

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import Field
from typing_extensions import TypedDict

from sightline.base.bundle import MAX_BEAMS
from sightline.base.text.languages import language_name
from sightline.service.api.endpoint import (
    BINARY,
    ENGINE_ERRORS,
    JSON_OR_FORM,
    WITH_FILE,
    Call,
    Endpoint,
    Headers,
    Raw,
    attachment,
    described,
)
from sightline.service.body_fields import File, OnEmpty, RequestBody, TextsWithBlanks
from sightline.service.inference.coverage import SentenceRepair, TextCoverage, joined_coverage
from sightline.service.inference.documents import read_file, translate_document
from sightline.service.inference.language_choice import language_pairs
from sightline.service.inference.routing import AUTO, detect, source_languages, translate_by_languages
from sightline.service.inference.translation import DetectedLanguage
from sightline.translation.files.kinds import KINDS
from sightline.translation.markup import HTML


class LanguagesBody(RequestBody):
    source_language: str = Field(alias="source", description='BCP 47 tag of the language, or "auto" to detect it.')
    target_language: str = Field(alias="target", description="BCP 47 tag of the language.")
    api_key: str | None = Field(default=None, description="API key, if the service needs one.")


class TranslateBody(LanguagesBody):
    on_empty: OnEmpty = "error"
    inputs: Annotated[TextsWithBlanks, Field(alias="q", description="Text to translate, or a list of texts.")]
    markup: Literal["text", "html"] | None = Field(
        default=None, alias="format", description="With html, tags are set where the words inside of them went."
    )
    alternatives: Annotated[int, Field(ge=0, lt=MAX_BEAMS)] | None = Field(
        default=None, description="Number of alternative translations of each text, from a beam search."
    )
    return_coverage: bool = Field(
        default=False,
        description="Extension: return which words of each text its translation omits, and which words are doubtful.",
    )
    repair: bool = Field(default=False, description="Extension: translate sentences that omit words again.")

    EXAMPLES = (
        {"q": "A dog runs.", "source": "en", "target": "de", "format": "text", "api_key": ""},
        {"q": "A <b>dog</b> runs.", "source": "en", "target": "de", "format": "html"},
        {"q": ["A dog runs.", "A man sleeps."], "source": "auto", "target": "de", "alternatives": 3},
    )


class DetectBody(RequestBody):
    q: Annotated[str, Field(description="The text.")]
    api_key: str | None = Field(default=None, description="API key, if the service needs one.")

    EXAMPLES = ({"q": "A dog runs."},)


class FileBody(LanguagesBody):
    file: File

    EXAMPLES = ({"file": "A `dog` runs.", "source": "en", "target": "de"},)


class TranslatedFile(TypedDict):
    translatedFileUrl: Annotated[str, Field(description="URL of the translation, which lasts for half an hour.")]


class Detected(TypedDict):
    language: Annotated[str, Field(description="BCP 47 tag.")]
    confidence: Annotated[float, Field(description="Percentage, among all languages.")]


class Translation(TypedDict):
    """A translation. All fields are lists if `q` was a list."""

    translatedText: Annotated[str | list[str], Field(description="The translation.")]
    alternatives: NotRequired[
        Annotated[list[str] | list[list[str]], Field(description="Alternative translations; only if requested.")]
    ]
    detectedLanguage: NotRequired[
        Annotated[Detected | list[Detected], Field(description="Language of the text; only if the source is auto.")]
    ]
    coverage: NotRequired[
        Annotated[TextCoverage | list[TextCoverage], Field(description="Extension; only with return_coverage.")]
    ]
    repairs: NotRequired[
        Annotated[
            Sequence[SentenceRepair] | list[Sequence[SentenceRepair]],
            Field(description="Extension: the sentences that were translated again; only with repair."),
        ]
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
    call.field_names = {**call.field_names, "num_beams": "1 + alternatives", "num_return_sequences": "alternatives"}
    markup = HTML if body.markup == "html" else None
    results = await translate_by_languages(
        call,
        body.inputs,
        body.source_language,
        body.target_language,
        markup,
        num_return_sequences=1 + (body.alternatives or 0),
        return_coverage=body.return_coverage,
        repair=body.repair,
    )
    # Beams may differ in tokens alone.
    distinct_texts = [
        dict.fromkeys([one.text for one in result] if text.strip() else [""])
        for text, result in zip(body.inputs.texts, results, strict=True)
    ]
    fields: dict[str, list[Any]] = {"translatedText": [next(iter(texts)) for texts in distinct_texts]}
    if body.alternatives:
        fields["alternatives"] = [list(texts)[1:] for texts in distinct_texts]
    if body.source_language == AUTO:
        detected = [best.detected or DetectedLanguage(best.route[0].source, 1.0) for best, *_ in results]
        fields["detectedLanguage"] = list(map(_detected, detected))
    if body.return_coverage:
        fields["coverage"] = [best.coverage or joined_coverage([]) for best, *_ in results]
    if body.repair:
        fields["repairs"] = [best.repairs for best, *_ in results]
    return cast(Translation, fields if body.inputs.is_list else {name: values[0] for name, values in fields.items()})


async def translate_file(call: Call, body: FileBody, headers: Headers) -> TranslatedFile:
    """Translate a document, and return the URL for its download."""
    document = await read_file(call, body.file)
    requested = {"source_language": body.source_language, "target_language": body.target_language}
    name = f"{secrets.token_hex(16)}.{body.file.extension}"
    call.service.documents.put(name, "done", await translate_document(call, document, requested))
    scheme = "https" if headers.get(b"x-forwarded-proto") == b"https" else "http"
    return {"translatedFileUrl": f"{scheme}://{headers.get(b'host', b'').decode('latin-1')}/download_file/{name}"}


async def download_file(call: Call, name: Annotated[str, described("Name in the URL of the translation.")]) -> Raw:
    """Return a translated document."""
    _, data = call.service.documents.get(name)
    return attachment(data, name)


async def detect_language(call: Call, body: DetectBody) -> list[Detected]:
    """Detect the language of a text, among those that are translated."""
    [found] = await detect([body.q], source_languages(call, None))
    return [_detected(language) for language in found if language.confidence > 0]


def _detected(found: DetectedLanguage) -> Detected:
    return {"language": found.language, "confidence": round(100 * found.confidence, 1)}


async def languages(call: Call) -> list[Language]:
    """List the languages and their target languages."""
    pairs = language_pairs(call)
    codes = sorted({*pairs, *(target for targets in pairs.values() for target in targets)})
    return [{"code": code, "name": language_name(code), "targets": pairs.get(code, [])} for code in codes]


async def settings(call: Call) -> dict[str, Any]:
    """Return what the page of LibreTranslate needs to know."""
    return {
        "apiKeys": call.service.keys is not None,
        "keyRequired": call.service.keys is not None,
        "charLimit": -1,
        "filesTranslation": True,
        "supportedFilesFormat": [f".{extension}" for extension in KINDS],
        "frontendTimeout": 500,
        "suggestions": False,
        "language": {
            name: {"code": code, "name": language_name(code)} for name, code in (("source", "auto"), ("target", "en"))
        },
    }


_post = partial(Endpoint, "POST", body_format=JSON_OR_FORM, key_field="api_key")
ENDPOINTS = (
    _post("/translate", translate, Translation, errors=(*ENGINE_ERRORS, "response_too_large")),
    _post(
        "/translate_file",
        translate_file,
        TranslatedFile,
        errors=("deadline_exceeded", "response_too_large"),
        body_format=WITH_FILE,
    ),
    Endpoint("GET", "/download_file/{name}", download_file, errors=("not_found",), media_types=(BINARY,), is_open=True),
    Endpoint("GET", "/frontend/settings", settings, dict[str, Any], ignores_query=True),
    _post("/detect", detect_language, list[Detected]),
    Endpoint("GET", "/languages", languages, list[Language], errors=("loading",)),
)
