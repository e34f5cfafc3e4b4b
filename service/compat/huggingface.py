"""Endpoints that TGI and TEI share: POST / and GET /info."""

from collections.abc import Awaitable, Callable, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import BaseModel, ConfigDict, Field, RootModel
from typing_extensions import TypedDict

from sightline import __version__
from sightline.base.bundle import Manifest, Task
from sightline.service.api.endpoint import EVENTS, JSON, OUTPUT_ERRORS, Call, Endpoint, EventStream, ModelInQuery
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import (
    RequestBody,
    Text,
    TextOrTexts,
    construct,
    described_as,
    fields_of,
    paths_of,
    validate,
)
from sightline.service.compat import tei, tgi
from sightline.service.compat.common import manifest_of_query, model_of_query
from sightline.service.parameters import MAX_STOP_STRINGS
from sightline.service.tasks import answer, fill_mask
from sightline.service.tasks.answer import Answer

# TEI's name of each pooling.
POOLINGS = {"mean": "mean", "first": "cls", "last": "last_token", "max": "max"}

# Tasks of Hugging Face's inference API that neither TGI nor TEI has.


class QuestionInputs(RequestBody):
    question: Annotated[Text, Field(description="The question.")]
    context: Annotated[Text, Field(description="The text that contains the answer.")]


class QuestionParameters(RequestBody):
    top_k: answer.TopK | None = None
    max_answer_tokens: answer.MaxAnswerTokens | None = Field(default=None, alias="max_answer_len")
    can_be_empty: answer.CanBeEmpty | None = Field(default=None, alias="handle_impossible_answer")
    whole_words: answer.WholeWords | None = Field(default=None, alias="align_to_words")
    max_tokens: answer.MaxTokens | None = Field(default=None, alias="max_seq_len")
    overlap: answer.Overlap | None = Field(default=None, alias="doc_stride")
    max_question_tokens: answer.MaxQuestionTokens | None = Field(default=None, alias="max_question_len")


class QuestionBody(RequestBody):
    inputs: Annotated[QuestionInputs, Field(description="Question and context.")]
    parameters: Annotated[QuestionParameters | None, Field(description="Options of the search.")] = None

    EXAMPLES = ({"inputs": {"question": "Where does the dog run?", "context": "A dog runs in Berlin."}},)


async def answer_question(call: Call, body: QuestionBody, model: str | None) -> Answer | list[Answer]:
    """Find the parts of a text that answer a question: one object, or a list of several."""
    name, inputs = manifest_of_query(call, model, "answer").name, body.inputs
    parameters = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
    options = construct(answer.AnswerBody, model=name, question=inputs.question, context=inputs.context, **parameters)
    answers = (await answer.answer_question(call, options)).answers
    return answers[0] if len(answers) == 1 else answers


class FillMaskParameters(RequestBody):
    top_k: fill_mask.TopK | None = None
    targets: fill_mask.Targets | None = None


class FillMaskTaskBody(RequestBody):
    inputs: Annotated[TextOrTexts, Field(description="A text with masks, or a list of them.")]
    parameters: Annotated[FillMaskParameters | None, Field(description="Options of the search.")] = None

    EXAMPLES = ({"inputs": "A dog [MASK] in the park."},)


class Filled(TypedDict):
    """A token for a mask."""

    score: Annotated[float, Field(description="Its probability among all tokens.")]
    token: Annotated[int, Field(description="Token id.")]
    token_str: Annotated[str, Field(description="Text of the token.")]
    sequence: Annotated[str, Field(description="The input with this token.")]


async def fill_masks(call: Call, body: FillMaskTaskBody, model: str | None) -> list[Any]:
    """Find the tokens for the masks of texts: lists of them, of masks if a text has several, and of
    texts if there are several.
    """
    name = manifest_of_query(call, model, "fill-mask").name
    parameters = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
    options = construct(fill_mask.FillMaskBody, model=name, inputs=body.inputs, **parameters)
    result = await fill_mask.fill_masks(call, options)
    outputs = []
    for output in result.outputs:
        masks: list[list[Filled]] = [
            [{"score": top.score, "token": top.id, "token_str": top.text, "sequence": top.sequence} for top in mask]
            for mask in output.masks
        ]
        outputs.append(masks[0] if len(masks) == 1 else masks)
    return outputs[0] if len(outputs) == 1 else outputs


class Operation(NamedTuple):
    """Operation of POST / for models of one task."""

    tag: str  # of the task, in Hugging Face's terms
    body: type[BaseModel]
    handler: Callable[[Call, Any, str], Awaitable[Any]]
    fields: frozenset[str]  # that only bodies of this task have


# A model with several of these tasks does the first of them.
OPERATIONS: dict[Task, Operation] = {
    "generate": Operation(
        "text2text-generation",
        tgi.TextGenerationBody,
        tgi.generate_text,
        frozenset({"stream", *fields_of(tgi.TextGenerationParameters)} - {"truncate", "top_k"}),
    ),
    "classify": Operation(
        "text-classification", tei.PredictBody, tei.predict, frozenset({"function_to_apply", "raw_scores"})
    ),
    "rerank": Operation("text-ranking", tei.TeiRerankBody, tei.rerank_texts, frozenset({"query", "texts"})),
    "tag": Operation(
        "token-classification",
        tei.TokenClassificationBody,
        tei.tag_tokens,
        frozenset({"aggregation_strategy", "ignore_labels"}),
    ),
    "answer": Operation(
        "question-answering",
        QuestionBody,
        answer_question,
        frozenset({"question", *fields_of(QuestionParameters)} - {"top_k"}),
    ),
    "fill-mask": Operation(
        "fill-mask", FillMaskTaskBody, fill_masks, frozenset(fields_of(FillMaskParameters)) - {"top_k"}
    ),
    "encode": Operation(
        "feature-extraction", tei.EmbedBody, tei.embed, frozenset({"normalize", "prompt_name", "dimensions"})
    ),
}
ZERO_SHOT = OPERATIONS["classify"]._replace(body=tei.ZeroShotBody, handler=tei.zero_shot)
ANY_BODY: Any = reduce(or_, [operation.body for operation in (ZERO_SHOT, *OPERATIONS.values())])


class TaskBody(RootModel[Any]):
    """The body of the endpoint that does the model's task, which validates it."""

    root: Annotated[dict[str, Any], described_as(ANY_BODY)]

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
    parameters = body.root.get("parameters")
    names_labels = isinstance(parameters, dict) and parameters.get("candidate_labels") is not None
    if model is not None:
        manifest = manifest_of_query(call, model)
    elif names_labels:
        manifest = manifest_of_query(call, None, default_for="zero-shot")
    else:
        manifest = _default_manifest(call, body.root)
    task = _main_task(manifest)
    operation = OPERATIONS[task]
    if task == "classify" and names_labels:
        operation = ZERO_SHOT
    elif task == "fill-mask" and not await _has_masks(call, body.root, manifest.name):
        operation = OPERATIONS["encode"]
    call.field_names = paths_of(operation.body)
    response = await operation.handler(call, validate(body.root, operation.body), manifest.name)
    if task != "generate" or isinstance(response, EventStream):
        return response
    translation = {"translation_text": response["generated_text"]} if manifest.languages else {}
    return [{**response, **translation}]


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
    named = [task for task, operation in OPERATIONS.items() if operation.fields & fields]
    if not named:
        served = {_main_task(manifest): manifest.name for manifest in reversed(call.service.require_manifests())}
        if len(served) > 1:
            examples = ", ".join(f"{name} for {OPERATIONS[task].tag}" for task, name in sorted(served.items()))
            message = (
                f"The fields of this body do not name its task. Choose a model in the URL, ?model=NAME: {examples}."
            )
            raise ApiError("invalid_parameter", message, field="model")
        named = list(served)
    return manifest_of_query(call, None, named[0])


def _main_task(manifest: Manifest) -> Task:
    return next((task for task in OPERATIONS if task in manifest.tasks), "encode")


async def info(call: Call, model: ModelInQuery) -> dict[str, Any]:
    """Describe a model and the service's limits, with the fields of TGI and TEI."""
    manifest, settings = manifest_of_query(call, model), call.service.settings
    max_input_tokens = manifest.limits.max_source_tokens
    return {
        "model_id": manifest.name,
        "served_model_name": manifest.name,
        "model_sha": manifest.digest,
        "model_dtype": manifest.dtype,
        "model_type": _type_of(manifest),
        "model_pipeline_tag": "text-generation" if manifest.is_decoder_only else OPERATIONS[_main_task(manifest)].tag,
        "max_concurrent_requests": call.service.models[manifest.name].max_rows + settings.max_waiting_sequences,
        "max_input_length": max_input_tokens,
        "max_input_tokens": max_input_tokens,
        "max_total_tokens": max_input_tokens + manifest.max_new_tokens_for(max_input_tokens),
        "max_batch_tokens": settings.max_batch_tokens,
        "max_batch_requests": None,  # no limit
        "max_client_batch_size": settings.max_inputs,
        "max_best_of": 1,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "auto_truncate": False,  # requests can set `truncate`
        "validation_workers": 1,  # the event loop
        "tokenization_workers": 1,
        "router": "sightline",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _type_of(manifest: Manifest) -> dict[str, Any]:
    labels, embedding = manifest.labels, manifest.embedding
    if not labels:
        return {"embedding": {"pooling": POOLINGS[embedding.pooling] if embedding else "mean"}}
    ids = {label: id_ for id_, label in enumerate(labels)}
    names = {"id2label": {str(id_): label for label, id_ in ids.items()}, "label2id": ids}
    return {"reranker" if "rerank" in manifest.tasks else "classifier": names}


ERRORS = tgi.ERRORS
_RESPONSE = (
    list[TranslationResponse]
    | tei.Predictions
    | list[tei.Rank]
    | tei.TokenEntities
    | Answer
    | list[Answer]
    | list[Filled]
    | list[list[Filled]]
    | list[list[list[Filled]]]
    | list[list[float]]
)
ENDPOINTS = (
    Endpoint("POST", "/", do_task, _RESPONSE, errors=OUTPUT_ERRORS, media_types=(JSON, EVENTS)),
    Endpoint("GET", "/info", info, dict[str, Any], errors=("model_not_found", "loading")),
)
