"""Routes of DeepL's API for texts, languages and usage; languages select the models."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from sightline.base.text.languages import language_name
from sightline.service.api.endpoint import (
    ENGINE_ERRORS,
    JSON_OR_FORM,
    Call,
    Endpoint,
    ErrorFormat,
    TypeInQuery,
    to_json,
)
from sightline.service.api_errors import complete_message
from sightline.service.body_fields import AnyTexts, RequestBody, must_equal
from sightline.service.compat.common import Ignored
from sightline.service.inference.language_choice import language_pairs
from sightline.service.inference.routing import AUTO, translate_by_languages
from sightline.translation.markup import MarkupKind

OPTIONAL_BODY = replace(JSON_OR_FORM, media_types=(*JSON_OR_FORM.media_types, ""), is_optional=True)
NO_LIMIT = 10**12  # characters; clients expect a limit


class DeeplTranslateBody(RequestBody):
    inputs: Annotated[AnyTexts, Field(alias="text", description="Text to translate, or a list of texts.")]
    target_language: str = Field(alias="target_lang", description="Language of the translation, such as DE or PT-BR.")
    source_language: str | None = Field(
        default=None, alias="source_lang", description="Language of the texts; detected if absent."
    )
    markup: MarkupKind | None = Field(
        default=None, alias="tag_handling", description="Tags are set where the words inside of them went."
    )
    formality: Annotated[
        Literal["default", "prefer_more", "prefer_less"] | None, Field(description="Accepted; models have one form.")
    ] = None
    split_sentences: Ignored[str | bool] = None
    preserve_formatting: Ignored[str | bool] = None
    context: Ignored[str] = None
    model_type: Ignored[str] = None
    outline_detection: Ignored[str | bool] = None
    tag_handling_version: Ignored[str] = None
    show_billed_characters: Ignored[str | bool] = None
    auth_key: Annotated[str | None, Field(description="API key, if the service needs one.")] = None
    glossary_id: Annotated[Any, must_equal()] = None
    style_id: Annotated[Any, must_equal()] = None
    custom_instructions: Annotated[Any, must_equal()] = None
    splitting_tags: Annotated[Any, must_equal()] = None
    non_splitting_tags: Annotated[Any, must_equal()] = None
    ignore_tags: Annotated[Any, must_equal(instead='mark the elements with translate="no"')] = None

    EXAMPLES = (
        {"text": ["A dog runs."], "target_lang": "DE"},
        {"text": ["A <b>dog</b> runs."], "source_lang": "EN", "target_lang": "DE", "tag_handling": "html"},
    )


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
    source = body.source_language or AUTO
    results = await translate_by_languages(call, body.inputs, source, body.target_language, body.markup)
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


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v2/translate",
        translate,
        DeeplTranslations,
        errors=(*ENGINE_ERRORS, "response_too_large", "unsupported_parameter"),
        body_format=JSON_OR_FORM,
        key_field="auth_key",
    ),
    Endpoint("GET", "/v2/languages", languages, list[DeeplLanguage], body_format=OPTIONAL_BODY),
    Endpoint("GET", "/v2/usage", usage, DeeplUsage),
)
