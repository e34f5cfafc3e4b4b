"""What the OpenAPI document says of requests and answers beyond what FastAPI finds: headers, forms, errors by code."""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel

from service.answers import ErrorAnswer
from service.bodies import FORM, JSON, BodyFormat
from service.errors import ERRORS, ApiError, ErrorCode, ErrorWriter
from service.middleware import REQUEST_ID

# Whatever the route, a request can be refused before its head was whole, with the service's own shape.
HEAD_ERRORS: tuple[ErrorCode, ...] = ("malformed_request", "client_too_slow", "headers_too_large")
EXAMPLE_REQUEST_ID = "0123456789abcdef01234567"

REQUEST_ID_PATTERN = f"^{REQUEST_ID.pattern}$"
ANSWER_HEADERS = {"X-Request-Id": {"required": True, "schema": {"type": "string", "pattern": REQUEST_ID_PATTERN}}}
RETRY_HEADERS = {"Retry-After": {"required": True, "description": "Seconds.", "schema": {"type": "integer"}}}
REQUEST_ID_HEADER = {
    "name": "X-Request-Id",
    "in": "header",
    "description": f"Echoed in the answer where it matches `{REQUEST_ID_PATTERN}`; otherwise another is made.",
    "schema": {"type": "string"},
}
TIMEOUT_HEADER = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "description": "Milliseconds that the call may take; the server's own limit can only be shortened.",
    "schema": {"type": "integer", "minimum": 1},
}
MODEL_PARAMETER = {
    "name": "model",
    "in": "query",
    "description": "Which model; the default model where it is absent.",
    "schema": {"type": "string"},
}
LENGTH_PARAMETER = {
    "in": "header",
    "description": "Bytes of the body that are JSON; all where it is absent.",
    "schema": {"type": "integer", "minimum": 1},
}


@dataclass(frozen=True)
class ErrorShape:
    """How a family of routes writes its errors; status and code are the same at every door."""

    write: ErrorWriter
    answer: type[BaseModel]  # what is written, for OpenAPI


OWN_ERRORS = ErrorShape(ApiError.body, ErrorAnswer)


class DeclaredErrors:
    """All errors that one route can answer with."""

    def __init__(self, codes: Sequence[ErrorCode], shape: ErrorShape) -> None:
        """`codes` are those of the route itself, written in its `shape`."""
        self._by_status: dict[int, list[tuple[ErrorCode, ErrorShape]]] = {}
        shapes = (*((code, OWN_ERRORS) for code in HEAD_ERRORS), *((code, shape) for code in codes))
        for code, shape_of_code in shapes:
            self._by_status.setdefault(ERRORS[code].status, []).append((code, shape_of_code))

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """As FastAPI takes them; `complete` does the rest."""
        declared: dict[int | str, dict[str, Any]] = {
            status: {
                "description": ", ".join(dict.fromkeys(code for code, _ in shapes)),
                "model": functools.reduce(operator.or_, dict.fromkeys(shape.answer for _, shape in shapes)),
                "headers": ANSWER_HEADERS | (RETRY_HEADERS if status == 503 else {}),
            }
            for status, shapes in sorted(self._by_status.items())
        }
        # Without it FastAPI declares an answer of its own for whatever it thinks that it will check.
        declared["default"] = {"description": "Not in the document."}
        return declared

    def complete(self, responses: dict[str, dict[str, Any]]) -> None:
        """Give each status an example of each code; FastAPI would leave out what is null in them."""
        del responses["default"]
        for status, shapes in self._by_status.items():
            # Of a code that has two shapes the route's own.
            examples = {code: _example(code, shape) for code, shape in shapes}
            responses[str(status)]["content"][JSON]["examples"] = examples


def declared_request(
    body_type: type[BaseModel] | None, body_format: BodyFormat, *, model_in_query: bool
) -> dict[str, Any]:
    """What OpenAPI is told of a request beside its JSON."""
    parameters: list[dict[str, Any]] = [REQUEST_ID_HEADER]
    if body_type is not None:
        parameters.append(TIMEOUT_HEADER)
    if model_in_query:
        parameters.append(MODEL_PARAMETER)
    if body_format.length_header is not None:
        parameters.append(LENGTH_PARAMETER | {"name": body_format.length_header})
    declared: dict[str, Any] = {"parameters": parameters}
    others = [kind for kind in body_format.media_types if kind not in ("", JSON)]
    if body_type is not None and others:
        binary = {"type": "string", "format": "binary"}
        schemas = {kind: _form_schema(body_type) if kind == FORM else binary for kind in others}
        declared["requestBody"] = {"content": {kind: {"schema": schema} for kind, schema in schemas.items()}}
    if body_format.is_optional:
        declared.setdefault("requestBody", {})["required"] = False
    return declared


def _form_schema(body_type: type[BaseModel]) -> dict[str, Any]:
    """What is left of a body in a form, where a field is one text or number, or absent."""
    schema = body_type.model_json_schema()
    for name, field in schema["properties"].items():
        kinds = field.pop("anyOf", [field])
        field.pop("default", None)
        schema["properties"][name] = field | next(kind for kind in kinds if kind["type"] not in ("null", "array"))
    return {name: schema[name] for name in ("type", "properties", "required", "additionalProperties")}


def _example(code: ErrorCode, shape: ErrorShape) -> Mapping[str, Any]:
    error = ApiError(code)
    return {"summary": error.message, "value": orjson.loads(shape.write(error, EXAMPLE_REQUEST_ID))}
