"""LibreTranslate's POST /translate and GET /languages; the languages choose the model."""

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from starlette.responses import Response

from service.bodies import FORM, JSON, BodyFormat, check_body
from service.bundle import MAX_BEAMS, Languages
from service.calls import Call, json_answer
from service.errors import ApiError
from service.families.common import SENTENCE_ERRORS
from service.families.naming import naming
from service.fields import TEXTS_SCHEMA, RequestBody, Texts, only, texts_named
from service.routes.generate import generated
from service.routing import ENGINE_ERRORS, add_route
from service.schemas import GenerateBody
from service.serving import ServedModel, Service

NAMES = {"inputs": "q", "num_beams": "1 + alternatives"}
LANGUAGE_NAMES = {"de": "German", "en": "English"}  # of those that the shipped bundles have
AUTO = "auto"
FORMAT = BodyFormat((JSON, FORM))


class TranslateBody(RequestBody):
    q: Annotated[Texts, PlainValidator(texts_named("q")), TEXTS_SCHEMA]
    source: str = Field(description='The code of a language, or "auto" where only one is translated into the target.')
    target: str = Field(description="The code of a language.")
    format: Annotated[Any, only("text")] = None
    alternatives: Annotated[int, Field(ge=0, lt=MAX_BEAMS)] | None = Field(
        default=None, description="So many other translations of each text, from a beam search."
    )
    api_key: str | None = Field(default=None, description="Means nothing here.")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"q": "A dog runs.", "source": "en", "target": "de", "format": "text", "api_key": ""},
                {"q": ["A dog runs.", "A man sleeps."], "source": "auto", "target": "de", "alternatives": 3},
            ]
        }
    )


class TranslateAnswer(BaseModel):
    """Of a list of texts, lists."""

    translatedText: str | list[str]  # noqa: N815 - its name in the protocol
    alternatives: list[str] | list[list[str]] | None = Field(default=None, description="Only where they are wanted.")


class Language(BaseModel):
    code: str
    name: str = Field(description="In English where it is known here, else the code.")
    targets: list[str] = Field(description="Codes of the languages that it is translated into.")


async def translate(body: TranslateBody, call: Call) -> Response:
    """Translate a text, or each of a list."""
    num_beams = 1 + (body.alternatives or 0)
    wanted = {
        "model": _model_for(body, call.service).name,
        "inputs": body.q.copies(1),
        "parameters": {"num_beams": num_beams, "num_return_sequences": num_beams},
    }
    with naming(NAMES):
        answer = await generated(check_body(wanted, GenerateBody), call)
    found: list[dict[str, None]] = [{} for _ in body.q.texts]  # beams may differ in tokens alone: each text once
    for output in answer["outputs"]:
        found[output["index"]][output["text"]] = None
    translated, others = zip(*((best, others) for best, *others in found), strict=True)
    content = {"translatedText": translated if body.q.is_list else translated[0]}
    if body.alternatives:
        content["alternatives"] = others if body.q.is_list else others[0]
    return json_answer(content)


async def languages(call: Call) -> Response:
    """List the languages that are translated."""
    pairs = {(pair.source, pair.target) for pair, _ in _translators(call.service)}
    content = [
        {
            "code": code,
            "name": LANGUAGE_NAMES.get(code, code),
            "targets": sorted(target for source, target in pairs if source == code),
        }
        for code in sorted({code for pair in pairs for code in pair})
    ]
    return json_answer(content)


def _translators(service: Service) -> list[tuple[Languages, ServedModel]]:
    return [(pair, model) for model in service.models if (pair := model.manifest.languages)]


def _model_for(body: TranslateBody, service: Service) -> ServedModel:
    """The default model if it translates so, else the first by name.

    Raises:
        ApiError: there is none, or `auto` leaves more than one source language.
    """
    fitting = [
        (pair, model)
        for pair, model in _translators(service)
        if pair.target == body.target and body.source in (AUTO, pair.source)
    ]
    if not fitting:
        message = "No model translates between these languages; GET /languages lists those that there are."
        raise ApiError("invalid_parameter", message)
    if len({pair.source for pair, _ in fitting}) > 1:
        message = "Languages are not detected, and several are translated into this target: name one."
        raise ApiError("unsupported_parameter", message, param="source")
    default = service.model(None)
    return next((model for _, model in fitting if model is default), fitting[0][1])


def add_routes(app: FastAPI) -> None:
    add_route(
        app,
        "POST",
        "/translate",
        translate,
        TranslateAnswer,
        errors=("input_too_long", *ENGINE_ERRORS, "unsupported_parameter"),
        error_shape=SENTENCE_ERRORS,
        body_format=FORMAT,
    )
    add_route(app, "GET", "/languages", languages, list[Language], errors=("loading",), error_shape=SENTENCE_ERRORS)
