"""What more than one family needs."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, Field

from service.bundle import Task
from service.calls import Call
from service.errors import ApiError, ErrorCode, ErrorType
from service.openapi import ErrorShape
from service.serving import ServedModel
from service.streaming import StreamedOutput


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


class SentenceError(BaseModel):
    error: str = Field(description="The path of the value at fault, where there is one, and what is wrong with it.")


def _sentence(error: ApiError) -> str:
    return f"{error.param}: {error.message}" if error.param else error.message


SENTENCE_ERRORS = ErrorShape(lambda error, request_id: orjson.dumps({"error": _sentence(error)}), SentenceError)


def typed_errors(
    types: Mapping[ErrorType, str], types_of_codes: Mapping[ErrorCode, str], answer: type[BaseModel]
) -> ErrorShape:
    """Errors of the same sentence and a type in the family's words."""

    def write(error: ApiError, request_id: str) -> bytes:
        error_type = types_of_codes.get(error.code) or types[error.kind.type]
        return orjson.dumps({"error": _sentence(error), "error_type": error_type})

    return ErrorShape(write, answer)


class DataFrames:
    """What most families' streams have in common: an error is an event as the others are, and no event ends them."""

    def end(self, outputs: Sequence[StreamedOutput]) -> bytes:
        return b""

    def error(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\n"


def check_goes_on(model: ServedModel, param: str) -> None:
    """Raise ApiError where the prompt is wanted before the text of a model that does not go on with it."""
    if not model.manifest.goes_on:
        message = f"{model.name} does not go on with its prompt, but answers it: leave this out."
        raise ApiError("unsupported_parameter", message, param=param)


def blank_before(model: ServedModel, token: dict[str, Any], target_prefix: str = "") -> str:
    """What a text lacks where it goes on with a prompt: the service's own texts begin without their blank.

    It begins with `target_prefix`, or without one with `token`.
    """
    return " " if model.manifest.goes_on and (target_prefix or token["text"].startswith(" ")) else ""


def check_dimensions(wanted: int | None, answer: dict[str, Any]) -> None:
    """Raise ApiError where embeddings are wanted of another size than the model's."""
    if wanted not in (None, answer["dimensions"]):
        message = f"This model's vectors have {answer['dimensions']} dimensions and cannot be cut."
        raise ApiError("unsupported_parameter", message, param="dimensions")
