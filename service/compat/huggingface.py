"""Endpoints that TGI and TEI share: POST / and GET /info."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel
from typing_extensions import TypedDict

from sightline import __version__
from sightline.base.bundle import Manifest, Task
from sightline.service.api.endpoint import EVENTS, JSON, OUTPUT_ERRORS, Call, Endpoint, EventStream, ModelInQuery
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import described_as, fields_of, paths_of, validate
from sightline.service.compat import huggingface_tasks as tasks
from sightline.service.compat import tei, tgi
from sightline.service.compat.common import manifest_of_query, model_of_query
from sightline.service.parameters import MAX_STOP_STRINGS
from sightline.service.tasks.answer import Answer

PipelineTag = Literal[
    "text-generation",
    "text2text-generation",
    "text-classification",
    "text-ranking",
    "token-classification",
    "question-answering",
    "fill-mask",
    "feature-extraction",
]
# A model with several of these tasks does the first of them at the base URL.
PIPELINE_TAGS: dict[Task, PipelineTag] = {
    "generate": "text2text-generation",
    "classify": "text-classification",
    "rerank": "text-ranking",
    "tag": "token-classification",
    "answer": "question-answering",
    "fill-mask": "fill-mask",
    "encode": "feature-extraction",
}
# Fields that only bodies of one task have.
TASK_FIELDS: dict[Task, frozenset[str]] = {
    "generate": frozenset({"stream", *fields_of(tgi.TextGenerationParameters)} - {"truncate", "top_k"}),
    "classify": frozenset({"function_to_apply", "raw_scores"}),
    "rerank": frozenset({"query", "texts"}),
    "tag": frozenset({"aggregation_strategy", "ignore_labels"}),
    "answer": frozenset({"question", *fields_of(tasks.QuestionParameters)} - {"top_k"}),
    "fill-mask": frozenset(fields_of(tasks.FillMaskParameters)) - {"top_k"},
    "encode": frozenset({"normalize", "prompt_name", "dimensions"}),
}
# TEI's name of each pooling.
POOLINGS: dict[str, Literal["mean", "cls", "last_token", "max"]] = {
    "mean": "mean",
    "first": "cls",
    "last": "last_token",
    "max": "max",
}


Body = TypeVar("Body", bound=BaseModel)
AnyBody = (
    tgi.TextGenerationBody
    | tei.PredictBody
    | tei.ZeroShotBody
    | tei.EmbedBody
    | tei.TeiRerankBody
    | tei.TokenClassificationBody
    | tasks.QuestionBody
    | tasks.FillMaskTaskBody
)


class TaskBody(RootModel[Any]):
    """The body of the endpoint that does the model's task, which validates it."""

    root: Annotated[dict[str, Any], described_as(AnyBody)]

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A man is riding a bicycle."}]})


class TranslationResponse(tgi.TextGenerationResponse):
    translation_text: NotRequired[Annotated[str, Field(description="The generated text; only for translation models.")]]


async def do_task(call: Call, body: TaskBody, model: ModelInQuery) -> Any:
    """Do the model's main task: generate, classify, rerank, classify tokens, answer questions, fill
    masks, or encode.

    A model with several tasks does the first of these. The body and the response are those of
    `/generate`, `/predict`, `/rerank`, Hugging Face's token classification, question answering
    and fill-mask, or `/embed`; the response of `/generate` is in a list. Without `?model=`, the
    fields of the body must determine the task: clients send `inputs` alone for several tasks. A
    model that fills masks encodes texts without its mask token, unless the body has `parameters`.
    """
    if model is None and _names_labels(body.root):
        manifest = manifest_of_query(call, None, default_for="zero-shot")
    else:
        manifest = manifest_of_query(call, model) if model is not None else _default_manifest(call, body.root)
    model = manifest.name
    if "generate" in manifest.tasks:
        response = await tgi.generate_text(call, _read(call, body, tgi.TextGenerationBody), model)
        if isinstance(response, EventStream):
            return response
        translation = {"translation_text": response["generated_text"]} if manifest.languages else {}
        return [{**response, **translation}]
    if "classify" in manifest.tasks and _names_labels(body.root):
        return await tei.zero_shot(call, _read(call, body, tei.ZeroShotBody), model)
    if "classify" in manifest.tasks:
        return await tei.predict(call, _read(call, body, tei.PredictBody), model)
    if "rerank" in manifest.tasks:
        return await tei.rerank_texts(call, _read(call, body, tei.TeiRerankBody), model)
    if "tag" in manifest.tasks:
        return await tei.tag_tokens(call, _read(call, body, tei.TokenClassificationBody), model)
    if "answer" in manifest.tasks:
        return await tasks.answer_question(call, _read(call, body, tasks.QuestionBody), model)
    if "fill-mask" in manifest.tasks and await _has_masks(call, body.root, model):
        return await tasks.fill_masks(call, _read(call, body, tasks.FillMaskTaskBody), model)
    return await tei.embed(call, _read(call, body, tei.EmbedBody), model)


def _names_labels(body: Mapping[str, Any]) -> bool:
    """Return True for the body of a zero-shot classification."""
    parameters = body.get("parameters")
    return isinstance(parameters, dict) and parameters.get("candidate_labels") is not None


async def _has_masks(call: Call, body: Mapping[str, Any], name: str) -> bool:
    """Return True if a body has options of a model that fills masks, or texts with masks."""
    if "parameters" in body:
        return True
    model = await model_of_query(call, name, "fill-mask")
    mask_id, inputs = model.manifest.tokens.mask_id, body.get("inputs")
    assert mask_id is not None, "a model with this task has a mask token"
    mask, texts = model.source_tokenizer.name(mask_id), inputs if isinstance(inputs, list) else [inputs]
    return any(isinstance(text, str) and mask in text for text in texts)


def _default_manifest(call: Call, body: Mapping[str, Any]) -> Manifest:
    """Return the default model of the task that the fields of a body name, or reject the body."""
    parts = [body, body.get("parameters"), body.get("inputs")]
    fields = {key for part in parts if isinstance(part, dict) for key in part}
    named = [task for task, names in TASK_FIELDS.items() if names & fields]
    if not named:
        served = {_main_task(manifest): manifest.name for manifest in reversed(call.service.require_manifests())}
        if len(served) > 1:
            examples = ", ".join(f"{name} for {PIPELINE_TAGS[task]}" for task, name in sorted(served.items()))
            message = (
                f"The fields of this body do not name its task. Choose a model in the URL, ?model=NAME: {examples}."
            )
            raise ApiError("invalid_parameter", message, field="model")
        named = list(served)
    return manifest_of_query(call, None, named[0])


def _main_task(manifest: Manifest) -> Task:
    return next(task for task in PIPELINE_TAGS if task in manifest.tasks)


def _read(call: Call, body: TaskBody, kind: type[Body]) -> Body:
    call.field_names = paths_of(kind)
    return validate(body.root, kind)


class EmbeddingType(TypedDict):
    pooling: Annotated[Literal["mean", "cls", "last_token", "max"], Field(description="Pooling of the token vectors.")]


class ClassifierType(TypedDict):
    id2label: Annotated[dict[str, str], Field(description="Labels by id.")]
    label2id: Annotated[dict[str, int], Field(description="Ids by label.")]


class ModelType(TypedDict):
    """Type of the model; exactly one field is present."""

    embedding: NotRequired[Annotated[EmbeddingType, Field(description="Present if the model has no labels.")]]
    classifier: NotRequired[Annotated[ClassifierType, Field(description="Present if the model is a classifier.")]]
    reranker: NotRequired[Annotated[ClassifierType, Field(description="Present if the model is a reranker.")]]


@dataclass(frozen=True)
class Info:
    """A model and the service's limits."""

    model_id: Annotated[str, Field(description="Name of the model.")]
    served_model_name: Annotated[str, Field(description="Name of the model.")]
    model_sha: Annotated[str, Field(description="Digest of the bundle's files.")]
    model_dtype: Annotated[str, Field(description="Data type of the weights.")]
    model_type: Annotated[ModelType, Field(description="Embedding model, classifier or reranker.")]
    model_pipeline_tag: Annotated[PipelineTag, Field(description="Task of the model, in Hugging Face's terms.")]
    max_concurrent_requests: Annotated[int, Field(description="Maximum sequences of one model that run or wait.")]
    max_input_length: Annotated[int, Field(description="Maximum tokens of an input.")]
    max_input_tokens: Annotated[int, Field(description="Maximum tokens of an input.")]
    max_total_tokens: Annotated[int, Field(description="Maximum tokens of an input and its output together.")]
    max_batch_tokens: Annotated[int, Field(description="Maximum tokens of an encoder batch, padding included.")]
    max_batch_requests: Annotated[None, Field(description="No limit: always null.")]
    max_client_batch_size: Annotated[int, Field(description="Maximum inputs of a call.")]
    max_best_of: Annotated[int, Field(description="Always 1.")]
    max_stop_sequences: Annotated[int, Field(description="Maximum number of stop strings.")]
    auto_truncate: Annotated[bool, Field(description="Always false; requests can set `truncate`.")]
    validation_workers: Annotated[int, Field(description="Always 1.")]
    tokenization_workers: Annotated[int, Field(description="Always 1.")]
    router: Annotated[str, Field(description="Always `sightline`.")]
    version: Annotated[str, Field(description="Version of the service.")]
    sha: Annotated[None, Field(description="Always null.")]
    docker_label: Annotated[None, Field(description="Always null.")]


async def info(call: Call, model: ModelInQuery) -> Info:
    """Describe a model and the service's limits."""
    manifest, settings = manifest_of_query(call, model), call.service.settings
    max_input_tokens = manifest.limits.max_source_tokens
    return Info(
        model_id=manifest.name,
        served_model_name=manifest.name,
        model_sha=manifest.digest,
        model_dtype=manifest.dtype,
        model_type=_type_of(manifest),
        model_pipeline_tag=_pipeline_tag(manifest),
        max_concurrent_requests=call.service.models[manifest.name].max_rows + settings.max_waiting_sequences,
        max_input_length=max_input_tokens,
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_input_tokens + manifest.max_new_tokens_for(max_input_tokens),
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=settings.max_inputs,
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


def _type_of(manifest: Manifest) -> ModelType:
    labels = manifest.labels
    if not labels:
        embedding = manifest.embedding
        return {"embedding": {"pooling": POOLINGS[embedding.pooling] if embedding else "mean"}}
    ids = {label: id_ for id_, label in enumerate(labels)}
    names: ClassifierType = {"id2label": {str(id_): label for label, id_ in ids.items()}, "label2id": ids}
    return {"reranker": names} if "rerank" in manifest.tasks else {"classifier": names}


def _pipeline_tag(manifest: Manifest) -> PipelineTag:
    return "text-generation" if manifest.is_decoder_only else PIPELINE_TAGS[_main_task(manifest)]


ERRORS = tgi.ERRORS
ENDPOINTS = (
    Endpoint(
        "POST",
        "/",
        do_task,
        list[TranslationResponse]
        | list[tei.Prediction]
        | list[list[tei.Prediction]]
        | list[tei.Rank]
        | list[tei.TokenEntity]
        | list[list[tei.TokenEntity]]
        | Answer
        | list[Answer]
        | list[tasks.Filled]
        | list[list[tasks.Filled]]
        | list[list[list[tasks.Filled]]]
        | list[list[float]],
        errors=OUTPUT_ERRORS,
        media_types=(JSON, EVENTS),
    ),
    Endpoint("GET", "/info", info, Info, errors=("model_not_found", "loading")),
)
