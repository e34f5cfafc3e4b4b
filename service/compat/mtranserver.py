"""Routes of MTranServer: lists of texts, also in the form of the extension Immersive Translate."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from sightline.service.api.endpoint import ENGINE_ERRORS, Call, Endpoint
from sightline.service.body_fields import AnyTexts, RequestBody
from sightline.service.inference.routing import AUTO, translate_by_languages
from sightline.translation.markup import HTML


class ImmersiveBody(RequestBody):
    source_language: str = Field(
        default=AUTO, alias="source_lang", description="Language of the texts; `auto` detects that of each."
    )
    target_language: str = Field(alias="target_lang", description="Language of the translations.")
    inputs: Annotated[AnyTexts, Field(alias="text_list", description="Paragraphs of a page.")]

    EXAMPLES = ({"source_lang": "auto", "target_lang": "de", "text_list": ["A dog runs."]},)


class ImmersiveTranslation(TypedDict):
    detected_source_lang: Annotated[str, Field(description="Language of the text, given or detected.")]
    text: Annotated[str, Field(description="The translation.")]


class ImmersiveTranslations(TypedDict):
    """The translations, in order."""

    translations: Annotated[list[ImmersiveTranslation], Field(description="The translation of each text.")]


class BatchBody(RequestBody):
    source_language: Annotated[str, Field(alias="from", description="Language of the texts, or `auto`.")] = AUTO
    target_language: Annotated[str, Field(alias="to", description="Language of the translations.")]
    inputs: Annotated[AnyTexts, Field(alias="texts", description="Texts to translate.")]
    markup: Annotated[bool, Field(alias="html", description="Tags are set where the words inside of them went.")] = (
        False
    )

    EXAMPLES = ({"from": "en", "to": "de", "texts": ["A <b>dog</b> runs."], "html": True},)


class BatchResults(TypedDict):
    """The translations, in order."""

    results: Annotated[list[str], Field(description="The translation of each text.")]


async def translate_batch(call: Call, body: BatchBody) -> BatchResults:
    """Translate texts or pieces of HTML."""
    markup = HTML if body.markup else None
    results = await translate_by_languages(call, body.inputs, body.source_language, body.target_language, markup)
    return {"results": [result[0].text for result in results]}


async def translate_page(call: Call, body: ImmersiveBody) -> ImmersiveTranslations:
    """Translate the paragraphs of a page."""
    results = await translate_by_languages(call, body.inputs, body.source_language or AUTO, body.target_language)
    return {
        "translations": [
            {"detected_source_lang": result[0].route[0].source, "text": result[0].text} for result in results
        ]
    }


ENDPOINTS = (
    Endpoint("POST", "/imme", translate_page, ImmersiveTranslations, errors=ENGINE_ERRORS),
    Endpoint("POST", "/translate/batch", translate_batch, BatchResults, errors=(*ENGINE_ERRORS, "response_too_large")),
)
