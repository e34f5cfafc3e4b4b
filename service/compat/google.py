"""Routes of Google's Cloud Translation, version 2; languages select the models."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from sightline.base.text.languages import language_name
from sightline.service.api.endpoint import ENGINE_ERRORS, JSON_OR_FORM, Call, Endpoint, ErrorFormat, to_json
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import AnyTexts, RequestBody, must_equal
from sightline.service.compat.common import Ignored
from sightline.service.inference.language_choice import language_pairs
from sightline.service.inference.routing import AUTO, detect, source_languages, translate_by_languages
from sightline.translation.markup import HTML

PATH = "/language/translate/v2"


class GoogleTranslateBody(RequestBody):
    inputs: Annotated[AnyTexts, Field(alias="q", description="Text to translate, or a list of texts.")]
    target_language: str = Field(alias="target", description="Language of the translation.")
    source_language: str | None = Field(
        default=None, alias="source", description="Language of the texts; detected if absent."
    )
    markup: Literal["text", "html"] | None = Field(
        default=None,
        alias="format",
        description="With html, the default, tags are set where the words inside of them went.",
    )
    model: Ignored[str] = None
    cid: Annotated[Any, must_equal([])] = None

    EXAMPLES = (
        {"q": ["A dog runs."], "source": "en", "target": "de", "format": "text"},
        {"q": "A <b>dog</b> runs.", "target": "de"},
    )


class GoogleDetectBody(RequestBody):
    q: Annotated[str | list[str], Field(description="A text, or a list of texts.")]

    EXAMPLES = ({"q": ["A dog runs."]},)


class GoogleData(TypedDict):
    """A response, with its content inside of `data`."""

    data: Annotated[dict[str, list[Any]], Field(description="`translations`, `languages` or `detections`.")]


class GoogleError(BaseModel):
    error: dict[str, Any] = Field(description="`code`, the HTTP status, and `message`, the explanation.")


def write_error(error: ApiError, message: str, param: str | None, request_id: str) -> bytes:
    status = 400 if error.kind.status == 422 else error.kind.status
    return to_json({"error": {"code": status, "message": complete_message(message, param)}})


ERRORS = ErrorFormat(write_error, GoogleError, invalid_status=400)


async def translate(call: Call, body: GoogleTranslateBody) -> GoogleData:
    """Translate texts or HTML, sentence by sentence."""
    markup = None if body.markup == "text" else HTML
    source = body.source_language or AUTO
    results = await translate_by_languages(call, body.inputs, source, body.target_language, markup)
    translations = [
        {"translatedText": best.text}
        | ({} if body.source_language else {"detectedSourceLanguage": best.route[0].source})
        for best, *_ in results
    ]
    return {"data": {"translations": translations}}


async def detect_language(call: Call, body: GoogleDetectBody) -> GoogleData:
    """Detect the languages of texts, among those that are translated."""
    texts = [body.q] if isinstance(body.q, str) else body.q
    found = await detect(texts, source_languages(call, None))
    return {"data": {"detections": [[{**vars(best), "isReliable": False}] for best, *_ in found]}}


async def languages(call: Call) -> GoogleData:
    """List the languages."""
    pairs = language_pairs(call)
    codes = sorted({*pairs}.union(*pairs.values()))
    return {"data": {"languages": [{"language": code, "name": language_name(code)} for code in codes]}}


_post = partial(Endpoint, "POST", body_format=JSON_OR_FORM, ignores_query=True)
ENDPOINTS = (
    _post(
        PATH,
        translate,
        GoogleData,
        errors=(*ENGINE_ERRORS, "invalid_parameter", "response_too_large", "unsupported_parameter"),
    ),
    _post(f"{PATH}/detect", detect_language, GoogleData, errors=("invalid_parameter",)),
    Endpoint("GET", f"{PATH}/languages", languages, GoogleData, errors=("loading",), ignores_query=True),
)
