"""The Open Inference Protocol v2 as Triton speaks it: infer and generate, and the routes about models."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.bodies import BodyFormat, check_body
from service.calls import Call, json_answer
from service.errors import ApiError, ErrorCode
from service.families import open_inference_models as models
from service.families import open_inference_schemas as schemas
from service.families.common import SENTENCE_ERRORS, DataFrames
from service.families.naming import naming
from service.families.open_inference_outputs import (
    NAMES,
    Answer,
    Output,
    Task,
    body_of,
    check_parameters,
    main_outputs,
    outputs_of,
)
from service.families.open_inference_schemas import VERSION, GenerateTextBody, InferBody, StreamTextBody, Version
from service.families.open_inference_tensors import LENGTH_HEADER, Tensor, read_texts, tensor_answer
from service.routes.classify import classified
from service.routes.encode import encoded
from service.routes.generate import generated, stream_generated
from service.routing import ENGINE_ERRORS, TASK_ERRORS, UNAVAILABLE_ERRORS, UnknownRoutes, add_route
from service.schemas import ClassifyBody, EncodeBody, GenerateBody
from service.streaming import StreamedOutput, frame

MODEL, VERSIONED = "/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"
TEXT = BodyFormat(("application/json", ""))  # its clients name no type
TENSORS = BodyFormat((*TEXT.media_types, "application/octet-stream"), length_header=LENGTH_HEADER)


async def infer(model_name: str, body: InferBody, call: Call) -> Response:
    """Compute the tensors that are asked for, of each text.

    Where a tensor is to be binary, the answer is JSON with its bytes behind it.
    """
    model = call.service.model(model_name)
    available = outputs_of(model.manifest)
    parameters = dict(body.parameters)
    is_binary = _is_binary(body, parameters.pop("binary_data_output", False), available)
    outputs = {name: available[name] for name in is_binary}
    check_parameters(parameters, {key for output in outputs.values() for key in (output.task, output.beside)})
    texts = read_texts(body.inputs[0], call.tail)
    answers: dict[Task, Answer] = {}
    with naming(NAMES):
        for task in dict.fromkeys(output.task for output in outputs.values()):
            call.resources.close()  # the place of the task before
            of_task = [output for output in outputs.values() if output.task == task]
            answers[task] = await _compute(task, body_of(task, model, texts, parameters, of_task), call)
    head = _head(body.id, model.name)
    return tensor_answer(
        head,
        [
            Tensor(name, output.datatype, output.read(answer), is_binary[name], output.parameters(answer))
            for name, output in outputs.items()
            for answer in [answers[output.task]]
        ],
    )


def _is_binary(body: InferBody, by_default: Any, available: Mapping[str, Output]) -> dict[str, bool]:
    """Whether each of the outputs that are asked for is to be binary."""
    if not isinstance(by_default, bool):
        raise ApiError("invalid_parameter", "It must be true or false.", param="parameters.binary_data_output")
    if not body.outputs:
        return dict.fromkeys(main_outputs(available), by_default)
    asked: dict[str, bool] = {}
    for place, output in enumerate(body.outputs):
        if output.name not in available or output.name in asked:
            message = "It stands twice." if output.name in asked else f"The model has {', '.join(available)}."
            raise ApiError("invalid_parameter", message, param=f"outputs[{place}].name")
        wanted = output.parameters.binary_data
        asked[output.name] = by_default if wanted is None else wanted
    return asked


async def _compute(task: Task, document: dict[str, Any], call: Call) -> Answer:
    match task:
        case "generate":
            return await generated(check_body(document, GenerateBody), call)
        case "classify":
            return await classified(check_body(document, ClassifyBody), call)
        case "encode":
            return await encoded(check_body(document, EncodeBody), call)


def _head(request_id: str | None, model_name: str) -> dict[str, Any]:
    return ({} if request_id is None else {"id": request_id}) | {"model_name": model_name, "model_version": VERSION}


async def generate(model_name: str, body: GenerateTextBody, call: Call) -> Response:
    """Generate one text from one text."""
    document = _generate_document(model_name, body, stream=False)
    with naming(NAMES):
        answer = await generated(check_body(document, GenerateBody), call)
    (output,) = answer["outputs"]
    written = {"text_output": output["text"], "finish_reason": output["finish_reason"]}
    return json_answer(_head(body.id, answer["model"]) | written)


async def generate_stream(model_name: str, body: StreamTextBody, call: Call) -> Response:
    """Generate one text from one text, as it comes.

    One event a token, then one with the reason of the end.
    """
    document = _generate_document(model_name, body, stream=True)
    with naming(NAMES):
        frames = TextFrames(_head(body.id, model_name))
        return await stream_generated(check_body(document, GenerateBody), call, frames)


def _generate_document(model_name: str, body: GenerateTextBody, *, stream: bool) -> dict[str, Any]:
    """The same as `POST /v1/generate` takes it."""
    parameters = dict(body.parameters)
    if parameters.pop("stream", stream) is not stream:
        message = "generate answers with the whole text, generate_stream with its pieces."
        raise ApiError("unsupported_parameter", message, param="parameters.stream")
    check_parameters(parameters, ["generate"])
    if parameters.get("num_return_sequences", 1) != 1:
        message = "This route answers with one text; infer has the rest."
        raise ApiError("unsupported_parameter", message, param="parameters.num_return_sequences")
    return {"model": model_name, "inputs": body.text_input, "parameters": parameters, "stream": stream}


class TextFrames(DataFrames):
    """The events of a stream."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = head

    def event(self, output: StreamedOutput, event: dict[str, Any]) -> bytes:
        if "token" in event:
            return frame(self._head | {"text_output": event["text"]})
        return frame(self._head | {"text_output": "", "finish_reason": event["finish_reason"]})


Endpoint = Callable[..., Awaitable[Response]]


def at_version(endpoint: Endpoint) -> Endpoint:
    """The same endpoint below a version of the model."""

    async def checked(*, model_version: str, **arguments: Any) -> Response:
        if model_version != VERSION:
            raise ApiError("model_not_found", f"A model has the version {VERSION} alone.", param="version")
        return await endpoint(**arguments)

    signature = inspect.signature(endpoint)
    version = inspect.Parameter("model_version", inspect.Parameter.KEYWORD_ONLY, annotation=Version)
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in signature.parameters.values()]
    checked.__signature__ = signature.replace(parameters=[*parameters, version])  # type: ignore[attr-defined]
    checked.__doc__, checked.__name__ = endpoint.__doc__, f"{endpoint.__name__}_of_version"
    return checked


def add_routes(app: FastAPI) -> None:
    of_model: tuple[ErrorCode, ...] = ("model_not_found", "loading")
    # No `unsupported_task`: whatever a model can do has tensors, and others it does not have.
    inferring: tuple[ErrorCode, ...] = (
        *("model_not_found", "input_too_long", *ENGINE_ERRORS),
        *("unsupported_parameter", "response_too_large"),
    )
    generating: tuple[ErrorCode, ...] = (*TASK_ERRORS, "unsupported_parameter")

    def get(path: str, endpoint: Endpoint, answer: Any, errors: Sequence[ErrorCode] = ()) -> None:
        add_route(app, "GET", path, endpoint, answer, errors=errors, error_shape=SENTENCE_ERRORS)

    def post(path: str, endpoint: Endpoint, answer: Any, body_format: BodyFormat = TEXT, **options: Any) -> None:
        add_route(app, "POST", path, endpoint, answer, error_shape=SENTENCE_ERRORS, body_format=body_format, **options)

    get("/v2", models.server_metadata, schemas.ServerMetadata)
    get("/v2/health/live", models.server_live, schemas.ServerLive)
    get("/v2/health/ready", models.server_ready, schemas.ServerReady, UNAVAILABLE_ERRORS)
    get("/v2/models/stats", models.all_statistics, schemas.ModelStatistics, ["loading"])
    for base, wrap in ((MODEL, lambda endpoint: endpoint), (VERSIONED, at_version)):
        get(base, wrap(models.model_metadata), schemas.ModelMetadata, of_model)
        get(f"{base}/ready", wrap(models.model_ready), schemas.ModelReady, ["model_not_found", *UNAVAILABLE_ERRORS])
        get(f"{base}/config", wrap(models.model_config), schemas.ModelConfig, of_model)
        get(f"{base}/stats", wrap(models.model_statistics), schemas.ModelStatistics, of_model)
        post(
            f"{base}/infer",
            wrap(infer),
            schemas.InferAnswer,
            errors=inferring,
            body_format=TENSORS,
            also_answers=["application/octet-stream"],
        )
        post(f"{base}/generate", wrap(generate), schemas.GenerateTextAnswer, errors=generating)
        post(
            f"{base}/generate_stream",
            wrap(generate_stream),
            schemas.GenerateTextAnswer,
            errors=generating,
            also_answers=["text/event-stream"],
        )
    post(
        "/v2/repository/index",
        models.repository_index,
        list[schemas.RepositoryModel],
        body_format=BodyFormat(TEXT.media_types, is_optional=True),
    )
    for verb in ("load", "unload"):
        path = f"/v2/repository/models/{{model_name}}/{verb}"
        post(path, models.repository_change, None, errors=["unsupported_parameter"])
    app.router.routes.append(UnknownRoutes("/v2/", SENTENCE_ERRORS))
