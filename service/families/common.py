"""What more than one family needs."""

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel

from service.bundle import Task
from service.calls import Call
from service.errors import ApiError, ErrorCode, ErrorType
from service.routing import ErrorShape
from service.serving import ServedModel


def model_of_query(call: Call, task: Task | None = None) -> ServedModel:
    """The model that `?model=` names, else the default model, for bodies that have no field for it.

    Raises:
        ApiError: `model_not_found`, `unsupported_task`.
    """
    try:
        return call.service.model(call.query_params.get("model"), task)
    except ApiError as error:
        if error.code != "unsupported_task":
            raise
        message = f"{error.message} Name another in the URL: ?model=NAME."
        raise ApiError(error.code, message, param=error.param) from None


def typed_errors(
    types: Mapping[ErrorType, str], types_of_codes: Mapping[ErrorCode, str], answer: type[BaseModel]
) -> ErrorShape:
    """Errors of one sentence, which begins with the path of the value at fault, and a type in the family's words."""

    def write(error: ApiError, request_id: str) -> bytes:
        message = f"{error.param}: {error.message}" if error.param else error.message
        error_type = types_of_codes.get(error.code) or types[error.kind.type]
        return orjson.dumps({"error": message, "error_type": error_type})

    return ErrorShape(write, answer)


def check_dimensions(wanted: int | None, answer: dict[str, Any]) -> None:
    """Raise ApiError where embeddings are wanted of another size than the model's."""
    if wanted not in (None, answer["dimensions"]):
        message = f"This model's vectors have {answer['dimensions']} dimensions and cannot be cut."
        raise ApiError("unsupported_parameter", message, param="dimensions")
