"""Endpoints of the Open Inference Protocol v2 with the extensions of Triton."""

import dataclasses
from functools import partial
from typing import Annotated

from sightline.service.api.endpoint import (
    BINARY,
    JSON,
    OUTPUT_ERRORS,
    UNAVAILABLE_ERRORS,
    UNTYPED_JSON,
    BodyFormat,
    Endpoint,
    described,
)
from sightline.service.api_errors import ApiError, ErrorCode
from sightline.service.compat.open_inference import models, schemas
from sightline.service.compat.open_inference.infer import infer
from sightline.service.compat.open_inference.schemas import VERSION, Version
from sightline.service.compat.open_inference.tensors import LENGTH_HEADER

MODEL, VERSIONED = "/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"
TENSORS = BodyFormat((*UNTYPED_JSON.media_types, BINARY), length_header=LENGTH_HEADER)
OPTIONAL_JSON = BodyFormat(UNTYPED_JSON.media_types, is_optional=True)
_MODEL_ERRORS: tuple[ErrorCode, ...] = ("model_not_found", "loading")
# No `unsupported_task`: a model only has the tensors of its own tasks.
_INFER_ERRORS = tuple(code for code in OUTPUT_ERRORS if code != "unsupported_task")


async def check_version(model_version: Annotated[Version, described("Version of the model; there is only 1.")]) -> None:
    """Reject another version of the model in the path."""
    if model_version != VERSION:
        raise ApiError("model_not_found", f"The only version of each model is {VERSION}.", path="version")


_get = partial(Endpoint, "GET", response=models.Info)
_post = partial(Endpoint, "POST", body_format=UNTYPED_JSON)
MODEL_ENDPOINTS = (
    _get(MODEL, models.model_metadata, errors=_MODEL_ERRORS),
    _get(f"{MODEL}/ready", models.model_ready, errors=("model_not_found", *UNAVAILABLE_ERRORS)),
    _get(f"{MODEL}/config", models.model_config, errors=_MODEL_ERRORS),
    _get(f"{MODEL}/stats", models.model_statistics, errors=_MODEL_ERRORS),
    _post(
        f"{MODEL}/infer", infer, schemas.InferResponse, _INFER_ERRORS, body_format=TENSORS, media_types=(JSON, BINARY)
    ),
)


def at_version(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint of a model on the path with the model's version."""
    return dataclasses.replace(
        endpoint,
        path=endpoint.path.replace(MODEL, VERSIONED),
        dependencies=(check_version,),
        name=f"{endpoint.handler.__name__}_of_version",
    )


PREFIX = "/v2/"
ENDPOINTS = (
    _get("/v2", models.server_metadata),
    _get("/v2/health/live", models.server_live, ignores_query=True, is_open=True),
    _get("/v2/health/ready", models.server_ready, errors=UNAVAILABLE_ERRORS, ignores_query=True, is_open=True),
    _get("/v2/models/stats", models.all_statistics, errors=("loading",)),
    *MODEL_ENDPOINTS,
    *map(at_version, MODEL_ENDPOINTS),
    _post("/v2/repository/index", models.repository_index, list[models.RepositoryModel], body_format=OPTIONAL_JSON),
    *(
        _post(
            f"/v2/repository/models/{{model_name}}/{verb}",
            handler,
            models.RepositoryModel,
            ("forbidden", "model_not_found"),
            role="admin",
            body_format=OPTIONAL_JSON,
        )
        for verb, handler in (("load", models.repository_load), ("unload", models.repository_unload))
    ),
)
