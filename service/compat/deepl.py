"""Routes of DeepL's API for texts, documents, languages and usage; languages select the models."""

import secrets
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from sightline.base.text.languages import language_name
from sightline.service.api.endpoint import (
    BINARY,
    ENGINE_ERRORS,
    JSON_OR_FORM,
    WITH_FILE,
    Call,
    Endpoint,
    ErrorFormat,
    Raw,
    TypeInQuery,
    attachment,
    described,
    to_json,
)
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import AnyTexts, File, RequestBody, must_equal
from sightline.service.compat.common import Ignored
from sightline.service.inference.document_store import State
from sightline.service.inference.documents import read_file, sample_of, translate_later
from sightline.service.inference.language_choice import language_pairs
from sightline.service.inference.routing import AUTO, routes_of, translate_by_languages
from sightline.translation.markup import MarkupKind, Tags

OPTIONAL_BODY = replace(JSON_OR_FORM, media_types=(*JSON_OR_FORM.media_types, ""), is_optional=True)
NO_LIMIT = 10**12  # characters; clients expect a limit
TagNames = Annotated[
    str | list[str] | None, Field(description="Names of elements, in a list or with commas between them.")
]
DocumentId = Annotated[str, described("Id of the document.")]


class DeeplBody(RequestBody):
    target_language: str = Field(alias="target_lang", description="Language of the translation, such as DE or PT-BR.")
    source_language: str | None = Field(
        default=None, alias="source_lang", description="Language of the texts; detected if absent."
    )
    formality: Annotated[
        Literal["default", "prefer_more", "prefer_less"] | None, Field(description="Accepted; models have one form.")
    ] = None
    auth_key: Annotated[str | None, Field(description="API key, if the service needs one.")] = None
    glossary_id: Annotated[Any, must_equal()] = None


class DeeplTranslateBody(DeeplBody):
    inputs: Annotated[AnyTexts, Field(alias="text", description="Text to translate, or a list of texts.")]
    markup: MarkupKind | None = Field(
        default=None, alias="tag_handling", description="Tags are set where the words inside of them went."
    )
    split_sentences: Ignored[str | bool] = None
    preserve_formatting: Ignored[str | bool] = None
    context: Ignored[str] = None
    model_type: Ignored[str] = None
    outline_detection: Annotated[
        str | bool | None,
        Field(description="If false, elements of XML end a sentence only if `splitting_tags` has them."),
    ] = None
    tag_handling_version: Ignored[str] = None
    show_billed_characters: Ignored[str | bool] = None
    style_id: Annotated[Any, must_equal()] = None
    custom_instructions: Annotated[Any, must_equal()] = None
    splitting_tags: TagNames = None
    non_splitting_tags: TagNames = None
    ignore_tags: TagNames = None

    EXAMPLES = (
        {"text": ["A dog runs."], "target_lang": "DE"},
        {"text": ["A <b>dog</b> runs."], "source_lang": "EN", "target_lang": "DE", "tag_handling": "html"},
    )


class DeeplDocumentBody(DeeplBody):
    file: File
    filename: Ignored[str] = None
    output_format: Annotated[Any, must_equal(instead="a translation has the format of its document")] = None

    EXAMPLES = ({"file": "A `dog` runs.", "target_lang": "DE", "source_lang": "EN"},)


class DeeplHandle(TypedDict):
    """A document that is being translated."""

    document_id: Annotated[str, Field(description="Id of the document.")]
    document_key: Annotated[str, Field(description="Key that its status and its download need.")]


class DeeplKeyBody(RequestBody):
    document_key: Annotated[str, Field(description="Key of the document.")]
    auth_key: Annotated[str | None, Field(description="API key, if the service needs one.")] = None

    EXAMPLES = ({"document_key": "0123456789abcdef"},)


class DeeplStatus(TypedDict):
    document_id: Annotated[str, Field(description="Id of the document.")]
    status: Annotated[State, Field(description="State of the translation.")]
    error_message: Annotated[str | None, Field(description="Explanation of an error.")]


class DeeplTranslation(TypedDict):
    detected_source_language: Annotated[str, Field(description="Language of the text, given or detected.")]
    text: Annotated[str, Field(description="The translation.")]
    billed_characters: Annotated[int, Field(description="Characters of the text.")]


class DeeplTranslations(TypedDict):
    """The translations, in order."""

    translations: Annotated[list[DeeplTranslation], Field(description="The translation of each text.")]


class DeeplLanguage(TypedDict):
    language: Annotated[str, Field(description="Code of the language.")]
    name: Annotated[str, Field(description="English name.")]
    supports_formality: Annotated[bool, Field(description="Always false.")]


class DeeplLanguagesBody(RequestBody):
    """The body of a GET request, as the package `deepl` sends it."""

    type: Annotated[str | None, Field(description="`source` (default) or `target`.")] = None

    EXAMPLES = ({"type": "target"},)


class DeeplUsage(TypedDict):
    """Characters that were translated. They are not counted; see the quotas of keys."""

    character_count: Annotated[int, Field(description="Always 0.")]
    character_limit: Annotated[int, Field(description="A number that is never reached.")]


class DeeplError(BaseModel):
    message: str = Field(description="Explanation, after the path of the value at fault.")


ERRORS = ErrorFormat(
    lambda error, message, param, request_id: to_json({"message": complete_message(message, param)}),
    DeeplError,
    invalid_status=400,
)


async def translate(call: Call, body: DeeplTranslateBody) -> DeeplTranslations:
    """Translate texts, HTML or XML, sentence by sentence."""
    source, tags = body.source_language or AUTO, None
    if body.markup is not None:
        has_outline = body.outline_detection not in (False, "0", "false")
        kept, blocks, inline = map(_names, (body.ignore_tags, body.splitting_tags, body.non_splitting_tags))
        tags = Tags(body.markup, kept, blocks, inline, has_outline)
    results = await translate_by_languages(call, body.inputs, source, body.target_language, tags)
    return {
        "translations": [
            {
                "detected_source_language": result[0].route[0].source.upper(),
                "text": result[0].text,
                "billed_characters": len(text),
            }
            for text, result in zip(body.inputs.texts, results, strict=True)
        ]
    }


def _names(tags: str | list[str] | None) -> frozenset[str]:
    listed = [tags] if isinstance(tags, str) else tags or ()
    return frozenset(name.strip() for each in listed for name in each.split(",")) - {""}


async def upload_document(call: Call, body: DeeplDocumentBody) -> DeeplHandle:
    """Begin to translate a document."""
    document = await read_file(call, body.file)
    requested = {"source_language": body.source_language or AUTO, "target_language": body.target_language}
    await routes_of(call, [sample_of(document)], requested)  # raises the error of a language
    document_id, document_key = f"{secrets.token_hex(16)}.{body.file.extension}", secrets.token_hex(32)
    translate_later(call, f"{document_id}:{document_key}", document, requested)
    return {"document_id": document_id, "document_key": document_key}


async def document_status(call: Call, document_id: DocumentId, body: DeeplKeyBody) -> DeeplStatus:
    """Return the state of a translation."""
    state, data = call.service.documents.get(f"{document_id}:{body.document_key}")
    return {
        "document_id": document_id,
        "status": state,
        "error_message": data.decode() if state == "error" else None,
    }


async def download_document(call: Call, document_id: DocumentId, body: DeeplKeyBody) -> Raw:
    """Return a translated document, and delete it."""
    key = f"{document_id}:{body.document_key}"
    state, data = call.service.documents.get(key)
    if state == "translating":
        raise ApiError("loading", "The document is still being translated. Retry later.")
    if state == "error":
        raise ApiError("invalid_parameter", f"The document could not be translated. {data.decode()}")
    call.service.documents.remove(key)
    return attachment(data, document_id)


async def languages(call: Call, body: DeeplLanguagesBody, type: TypeInQuery = None) -> list[DeeplLanguage]:  # noqa: A002
    """List the source languages, or the target languages."""
    pairs = language_pairs(call)
    codes = {code for targets in pairs.values() for code in targets} if "target" in (type, body.type) else {*pairs}
    return [
        {"language": code.upper(), "name": language_name(code), "supports_formality": False} for code in sorted(codes)
    ]


async def usage(call: Call) -> DeeplUsage:
    """Return a usage of nothing, for clients that ask before they translate."""
    return {"character_count": 0, "character_limit": NO_LIMIT}


_post = partial(Endpoint, "POST", body_format=JSON_OR_FORM, key_field="auth_key")
ENDPOINTS = (
    _post(
        "/v2/translate",
        translate,
        DeeplTranslations,
        errors=(*ENGINE_ERRORS, "response_too_large", "unsupported_parameter"),
    ),
    _post("/v2/document", upload_document, DeeplHandle, errors=("unsupported_parameter",), body_format=WITH_FILE),
    _post("/v2/document/{document_id}", document_status, DeeplStatus, errors=("not_found",)),
    _post("/v2/document/{document_id}/result", download_document, errors=("not_found",), media_types=(BINARY,)),
    Endpoint("GET", "/v2/languages", languages, list[DeeplLanguage], body_format=OPTIONAL_BODY),
    Endpoint("GET", "/v2/usage", usage, DeeplUsage),
)
