"""Parts that several compatibility APIs share."""

from collections.abc import Mapping

import orjson
from pydantic import BaseModel, Field

from service.api.endpoint import ErrorFormat
from service.bundle import Task
from service.errors import ApiError, ErrorCode, ErrorType
from service.inference.call import Call
from service.inference.generate import Stream
from service.inference.results import OutputToken
from service.inference.service import ServedModel


def model_of_query(call: Call, name: str | None, task: Task | None = None) -> ServedModel:
    """Return the model that `?model=` names, or the default model, for bodies that have no field for it.

    Raises:
        ApiError: `model_not_found`, `unsupported_task`.
    """
    try:
        return call.model(name, task)
    except ApiError as error:
        if error.code != "unsupported_task":
            raise
        message = f"{error.message({})} Name another in the URL: ?model=NAME."
        raise ApiError(error.code, message, field="model") from None


class SentenceError(BaseModel):
    error: str = Field(description="The path of the value at fault, if there is one, and what is wrong with it.")


def sentence(message: str, param: str | None) -> str:
    return f"{param}: {message}" if param else message


SENTENCE_ERRORS = ErrorFormat(
    lambda error, message, param, request_id: orjson.dumps({"error": sentence(message, param)}), SentenceError
)


def typed_errors(
    types: Mapping[ErrorType, str], types_of_codes: Mapping[ErrorCode, str], response: type[BaseModel]
) -> ErrorFormat:
    """Return the format of errors that have the same sentence, and a type in the API's words."""

    def write(error: ApiError, message: str, param: str | None, request_id: str) -> bytes:
        error_type = types_of_codes.get(error.code) or types[error.kind.type]
        return orjson.dumps({"error": sentence(message, param), "error_type": error_type})

    return ErrorFormat(write, response)


class DataEventEncoder:
    """Parts of an event encoder that most APIs share: an error is a data event, and no event follows the last."""

    def close(self, stream: Stream) -> bytes:
        return b""

    def error(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\n"


def check_continues_prompt(model: ServedModel, path: str) -> None:
    """Refuse to return the prompt before the text of a model that does not continue it.

    Raises:
        ApiError: `unsupported_parameter`.
    """
    if not model.manifest.goes_on:
        message = f"{model.name} does not go on with its prompt, but answers it: leave this out."
        raise ApiError("unsupported_parameter", message, path=path)


def blank_before(model: ServedModel, token: OutputToken, target_prefix: str = "") -> str:
    """Return the blank between a prompt and the text that continues it; the service's texts begin without it.

    The text begins with `target_prefix`, or without one with `token`.
    """
    return " " if model.manifest.goes_on and (target_prefix or token.text.startswith(" ")) else ""


def check_dimensions(requested: int | None, dimensions: int) -> None:
    """Refuse embeddings of another size than the model's.

    Raises:
        ApiError: `unsupported_parameter`.
    """
    if requested not in (None, dimensions):
        message = f"This model's vectors have {dimensions} dimensions and cannot be cut."
        raise ApiError("unsupported_parameter", message, path="dimensions")
