"""Endpoints of the Open Inference Protocol v2 with the extensions of Triton."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from service.api.endpoint import (
    ENGINE_ERRORS,
    EVENTS,
    JSON,
    TASK_ERRORS,
    UNAVAILABLE_ERRORS,
    BodyFormat,
    Endpoint,
)
from service.compat.common import SENTENCE_ERRORS
from service.compat.open_inference import models, schemas
from service.compat.open_inference.infer import generate, generate_stream, infer
from service.compat.open_inference.schemas import VERSION, Version
from service.compat.open_inference.tensors import LENGTH_HEADER
from service.errors import ApiError, ErrorCode

MODEL, VERSIONED = "/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"
BINARY = "application/octet-stream"
TEXT = BodyFormat((JSON, ""))  # its clients send no Content-Type
TENSORS = BodyFormat((*TEXT.media_types, BINARY), length_header=LENGTH_HEADER)
_OF_MODEL: tuple[ErrorCode, ...] = ("model_not_found", "loading")
# No `unsupported_task`: a model only has the tensors of its own tasks.
_INFERRING: tuple[ErrorCode, ...] = (
    *("model_not_found", "input_too_long", *ENGINE_ERRORS),
    *("unsupported_parameter", "response_too_large"),
)
_GENERATING: tuple[ErrorCode, ...] = (*TASK_ERRORS, "unsupported_parameter")

Handler = Callable[..., Awaitable[Any]]


def at_version(handler: Handler) -> Handler:
    """Return a handler for a path with the version of the model."""

    async def checked(call: Any, *, model_version: str, **arguments: Any) -> Any:
        if model_version != VERSION:
            raise ApiError("model_not_found", f"The only version of each model is {VERSION}.", path="version")
        return await handler(call, **arguments)

    signature = inspect.signature(handler)
    version = inspect.Parameter("model_version", inspect.Parameter.KEYWORD_ONLY, annotation=Version)
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in signature.parameters.values()]
    checked.__signature__ = signature.replace(parameters=[*parameters, version])  # type: ignore[attr-defined]
    checked.__doc__, checked.__name__ = handler.__doc__, f"{handler.__name__}_of_version"
    return checked


def _get(path: str, handler: Handler, response: Any, errors: Sequence[ErrorCode] = ()) -> Endpoint:
    return Endpoint("GET", path, handler, response, errors, error_format=SENTENCE_ERRORS)


def _post(path: str, handler: Handler, response: Any, errors: Sequence[ErrorCode], **options: Any) -> Endpoint:
    return Endpoint(
        "POST", path, handler, response, errors, error_format=SENTENCE_ERRORS, **({"body_format": TEXT} | options)
    )


def _of_model(base: str, wrap: Callable[[Handler], Handler]) -> Iterator[Endpoint]:
    yield _get(base, wrap(models.model_metadata), schemas.ModelMetadata, _OF_MODEL)
    yield _get(f"{base}/ready", wrap(models.model_ready), schemas.ModelReady, ("model_not_found", *UNAVAILABLE_ERRORS))
    yield _get(f"{base}/config", wrap(models.model_config), schemas.ModelConfig, _OF_MODEL)
    yield _get(f"{base}/stats", wrap(models.model_statistics), schemas.ModelStatistics, _OF_MODEL)
    yield _post(
        f"{base}/infer",
        wrap(infer),
        schemas.InferResponse,
        _INFERRING,
        body_format=TENSORS,
        media_types=(JSON, BINARY),
    )
    yield _post(f"{base}/generate", wrap(generate), schemas.GenerateTextResponse, _GENERATING)
    yield _post(
        f"{base}/generate_stream",
        wrap(generate_stream),
        schemas.GenerateTextResponse,
        _GENERATING,
        media_types=(JSON, EVENTS),
    )


ENDPOINTS = (
    _get("/v2", models.server_metadata, schemas.ServerMetadata),
    _get("/v2/health/live", models.server_live, schemas.ServerLive),
    _get("/v2/health/ready", models.server_ready, schemas.ServerReady, UNAVAILABLE_ERRORS),
    _get("/v2/models/stats", models.all_statistics, schemas.ModelStatistics, ("loading",)),
    *_of_model(MODEL, lambda handler: handler),
    *_of_model(VERSIONED, at_version),
    _post(
        "/v2/repository/index",
        models.repository_index,
        list[schemas.RepositoryModel],
        (),
        body_format=BodyFormat(TEXT.media_types, is_optional=True),
    ),
    *(
        _post(
            f"/v2/repository/models/{{model_name}}/{verb}",
            handler,
            schemas.RepositoryModel,
            ("forbidden", "model_not_found"),
            body_format=BodyFormat(TEXT.media_types, is_optional=True),
        )
        for verb, handler in (("load", models.repository_load), ("unload", models.repository_unload))
    ),
)
