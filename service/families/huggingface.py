"""What clients of Text Generation Inference and of Text Embeddings Inference both ask for: POST / and GET /info."""

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.responses import Response

from service import __version__
from service.bodies import check_body
from service.calls import Call, json_answer
from service.families.common import model_of_query
from service.families.tei import embed, predict
from service.families.tei_schemas import EmbedBody, PredictBody, Prediction
from service.families.tgi import ERRORS, generate, text_generated
from service.families.tgi_schemas import TextGenerationAnswer, TextGenerationBody
from service.fields import MAX_INPUTS, described_as
from service.parameters import MAX_STOP_STRINGS
from service.routing import TASK_ERRORS, add_route
from service.serving import ServedModel


class TaskBody(RootModel[Any]):
    """The body of the route that the model's task chooses, which checks it."""

    root: Annotated[dict[str, Any], described_as(TextGenerationBody | PredictBody | EmbedBody)]

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A man is riding a bicycle."}]})


class TranslationAnswer(TextGenerationAnswer):
    translation_text: str | None = Field(default=None, description="The same text, of a model that translates.")


async def do_task(body: TaskBody, call: Call) -> Response:
    """Do what the model is for: generate if it can, else classify if it can, else encode.

    The body is that of `/generate`, `/predict` or `/embed`, and so is the answer; that of `/generate` in a list.
    """
    manifest = model_of_query(call).manifest
    if "generate" in manifest.tasks:
        wanted = check_body(body.root, TextGenerationBody)
        if wanted.stream:
            return await generate(wanted, call)
        answer = await text_generated(wanted, call)
        return json_answer([answer | ({"translation_text": answer["generated_text"]} if manifest.languages else {})])
    if "classify" in manifest.tasks:
        return await predict(check_body(body.root, PredictBody), call)
    return await embed(check_body(body.root, EmbedBody), call)


class EmbeddingType(BaseModel):
    pooling: Literal["mean"]


class ClassifierType(BaseModel):
    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(BaseModel):
    """One of the two."""

    embedding: EmbeddingType | None = None
    classifier: ClassifierType | None = None


class InfoAnswer(BaseModel):
    model_id: str
    served_model_name: str
    model_sha: str
    model_dtype: str
    model_type: ModelType
    model_pipeline_tag: Literal["text-generation", "text2text-generation", "text-classification", "feature-extraction"]
    max_concurrent_requests: int = Field(description="Sequences of one model that run or wait.")
    max_input_length: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_tokens: int
    max_batch_requests: None
    max_client_batch_size: int
    max_best_of: int
    max_stop_sequences: int
    auto_truncate: bool
    validation_workers: int
    tokenization_workers: int
    router: str
    version: str
    sha: None
    docker_label: None


async def info(call: Call) -> Response:
    """Describe a model and the service's limits."""
    model = model_of_query(call)
    manifest, settings = model.manifest, call.service.settings
    max_input_tokens = manifest.limits.max_source_tokens
    answer = {
        "model_id": model.name,
        "served_model_name": model.name,
        "model_sha": manifest.digest,
        "model_dtype": manifest.dtype,
        "model_type": _type_of(model),
        "model_pipeline_tag": _pipeline_tag(model),
        "max_concurrent_requests": settings.max_rows + settings.max_waiting_sequences,
        "max_input_length": max_input_tokens,
        "max_input_tokens": max_input_tokens,
        "max_total_tokens": max_input_tokens + manifest.room(max_input_tokens),
        "max_batch_tokens": settings.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "max_best_of": 1,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "auto_truncate": False,
        "validation_workers": 1,  # the event loop
        "tokenization_workers": 1,
        "router": "sightline",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    return json_answer(answer)


def _type_of(model: ServedModel) -> dict[str, Any]:
    labels = model.manifest.labels
    if not labels:
        return {"embedding": {"pooling": "mean"}}
    ids = {label: id_ for id_, label in enumerate(labels)}
    return {"classifier": {"id2label": {str(id_): label for label, id_ in ids.items()}, "label2id": ids}}


def _pipeline_tag(model: ServedModel) -> str:
    manifest = model.manifest
    if "generate" in manifest.tasks:
        return "text-generation" if manifest.goes_on else "text2text-generation"
    return "text-classification" if "classify" in manifest.tasks else "feature-extraction"


def add_routes(app: FastAPI) -> None:
    add_route(
        app,
        "POST",
        "/",
        do_task,
        list[TranslationAnswer] | list[Prediction] | list[list[Prediction]] | list[list[float]],
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
        also_answers=["text/event-stream"],
        error_shape=ERRORS,
        model_in_query=True,
    )
    add_route(
        app,
        "GET",
        "/info",
        info,
        InfoAnswer,
        errors=("model_not_found", "loading"),
        error_shape=ERRORS,
        model_in_query=True,
    )
