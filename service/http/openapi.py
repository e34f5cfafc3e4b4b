"""Parts of the OpenAPI document that FastAPI cannot derive: headers, forms, and errors by code."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel

from service.api.endpoint import FORM, JSON, NATIVE_ERRORS, BodyFormat, ErrorFormat
from service.errors import ERRORS, ApiError, ErrorCode
from service.http.call import REQUEST_ID

# Whatever the route, a request can be refused before its head was whole, with the service's own shape.
HEAD_ERRORS: tuple[ErrorCode, ...] = ("malformed_request", "client_too_slow", "headers_too_large")
EXAMPLE_REQUEST_ID = "0123456789abcdef01234567"

REQUEST_ID_PATTERN = f"^{REQUEST_ID.pattern}$"
RESPONSE_HEADERS = {"X-Request-Id": {"required": True, "schema": {"type": "string", "pattern": REQUEST_ID_PATTERN}}}
RETRY_HEADERS = {"Retry-After": {"required": True, "description": "Seconds.", "schema": {"type": "integer"}}}
REQUEST_ID_HEADER = {
    "name": "X-Request-Id",
    "in": "header",
    "description": f"Returned in the response if it matches `{REQUEST_ID_PATTERN}`; otherwise a new one is generated.",
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
    "description": "Name of the model; the default model if absent.",
    "schema": {"type": "string"},
}
LENGTH_PARAMETER = {
    "in": "header",
    "description": "Bytes of the body that are JSON; all where it is absent.",
    "schema": {"type": "integer", "minimum": 1},
}


class DeclaredErrors:
    """All errors that one route can answer with."""

    def __init__(self, codes: Sequence[ErrorCode], error_format: ErrorFormat) -> None:
        """`codes` are those of the route itself, written in its error format."""
        self._by_status: dict[int, list[tuple[ErrorCode, ErrorFormat]]] = {}
        formats = (*((code, NATIVE_ERRORS) for code in HEAD_ERRORS), *((code, error_format) for code in codes))
        for code, format_of_code in formats:
            self._by_status.setdefault(ERRORS[code].status, []).append((code, format_of_code))

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """As FastAPI takes them; `complete` does the rest."""
        declared: dict[int | str, dict[str, Any]] = {
            status: {
                "description": ", ".join(dict.fromkeys(code for code, _ in formats)),
                "model": functools.reduce(operator.or_, dict.fromkeys(one.response for _, one in formats)),
                "headers": RESPONSE_HEADERS | (RETRY_HEADERS if status == 503 else {}),
            }
            for status, formats in sorted(self._by_status.items())
        }
        # Without it FastAPI declares an answer of its own for whatever it thinks that it will check.
        declared["default"] = {"description": "Not in the document."}
        return declared

    def complete(self, responses: dict[str, dict[str, Any]]) -> None:
        """Give each status an example of each code; FastAPI would leave out what is null in them."""
        del responses["default"]
        for status, formats in self._by_status.items():
            # Of a code that has two formats the endpoint's own.
            examples = {code: _example(code, one) for code, one in formats}
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


def _example(code: ErrorCode, error_format: ErrorFormat) -> Mapping[str, Any]:
    error = ApiError(code)
    message = error.message({})
    return {"summary": message, "value": orjson.loads(error_format.write(error, message, None, EXAMPLE_REQUEST_ID))}
