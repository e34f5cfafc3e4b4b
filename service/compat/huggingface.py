"""Endpoints that TGI and TEI share: POST /, which does the task of the model, and GET /info."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, RootModel
from typing_extensions import TypedDict

from service import __version__
from service.api.endpoint import EVENTS, JSON, TASK_ERRORS, Endpoint, EventStream
from service.compat.common import model_of_query
from service.compat.tei import embed, predict
from service.compat.tei_schemas import EmbedBody, PredictBody, Prediction
from service.compat.tgi import ERRORS, generate_text
from service.compat.tgi_schemas import TextGenerationBody, TextGenerationResponse
from service.fields import MAX_INPUTS, described_as, validate
from service.inference.call import Call
from service.inference.service import ServedModel
from service.parameters import MAX_STOP_STRINGS


class TaskBody(RootModel[Any]):
    """The body of the endpoint that does the model's task, which validates it."""

    root: Annotated[dict[str, Any], described_as(TextGenerationBody | PredictBody | EmbedBody)]

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A man is riding a bicycle."}]})


class TranslationResponse(TextGenerationResponse):
    translation_text: NotRequired[Annotated[str, Field(description="The same text, of a model that translates.")]]


async def do_task(call: Call, body: TaskBody, model: str | None) -> Any:
    """Do what the model is for: generate if it can, else classify if it can, else encode.

    The body is that of `/generate`, `/predict` or `/embed`, and so is the response; that of `/generate` in a list.
    """
    manifest = model_of_query(call, model).manifest
    if "generate" in manifest.tasks:
        response = await generate_text(call, validate(body.root, TextGenerationBody), model)
        if isinstance(response, EventStream):
            return response
        translation = {"translation_text": response["generated_text"]} if manifest.languages else {}
        return [{**response, **translation}]
    if "classify" in manifest.tasks:
        return await predict(call, validate(body.root, PredictBody), model)
    return await embed(call, validate(body.root, EmbedBody), model)


class EmbeddingType(TypedDict):
    pooling: Literal["mean"]


class ClassifierType(TypedDict):
    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(TypedDict):
    """One of the two."""

    embedding: NotRequired[EmbeddingType]
    classifier: NotRequired[ClassifierType]


@dataclass(frozen=True)
class Info:
    """A model and the service's limits."""

    model_id: str
    served_model_name: str
    model_sha: str
    model_dtype: str
    model_type: ModelType
    model_pipeline_tag: Literal["text-generation", "text2text-generation", "text-classification", "feature-extraction"]
    max_concurrent_requests: Annotated[int, Field(description="Sequences of one model that run or wait.")]
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


async def info(call: Call, model: str | None) -> Info:
    """Describe a model and the service's limits."""
    served = model_of_query(call, model)
    manifest, settings = served.manifest, call.service.settings
    max_input_tokens = manifest.limits.max_source_tokens
    return Info(
        model_id=served.name,
        served_model_name=served.name,
        model_sha=manifest.digest,
        model_dtype=manifest.dtype,
        model_type=_type_of(served),
        model_pipeline_tag=_pipeline_tag(served),
        max_concurrent_requests=served.max_rows + settings.max_waiting_sequences,
        max_input_length=max_input_tokens,
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_input_tokens + manifest.room(max_input_tokens),
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=MAX_INPUTS,
        max_best_of=1,
        max_stop_sequences=MAX_STOP_STRINGS,
        auto_truncate=False,
        validation_workers=1,  # the event loop
        tokenization_workers=1,
        router="sightline",
        version=__version__,
        sha=None,
        docker_label=None,
    )


def _type_of(model: ServedModel) -> ModelType:
    labels = model.manifest.labels
    if not labels:
        return {"embedding": {"pooling": "mean"}}
    ids = {label: id_ for id_, label in enumerate(labels)}
    return {"classifier": {"id2label": {str(id_): label for label, id_ in ids.items()}, "label2id": ids}}


def _pipeline_tag(
    model: ServedModel,
) -> Literal["text-generation", "text2text-generation", "text-classification", "feature-extraction"]:
    manifest = model.manifest
    if "generate" in manifest.tasks:
        return "text-generation" if manifest.goes_on else "text2text-generation"
    return "text-classification" if "classify" in manifest.tasks else "feature-extraction"


ENDPOINTS = (
    Endpoint(
        "POST",
        "/",
        do_task,
        list[TranslationResponse] | list[Prediction] | list[list[Prediction]] | list[list[float]],
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
        media_types=(JSON, EVENTS),
        error_format=ERRORS,
    ),
    Endpoint("GET", "/info", info, Info, errors=("model_not_found", "loading"), error_format=ERRORS),
)
