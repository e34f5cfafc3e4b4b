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

# Any request can fail before its head is complete. Such errors have the native format.
HEAD_ERRORS: tuple[ErrorCode, ...] = ("malformed_request", "client_too_slow", "headers_too_large")
EXAMPLE_REQUEST_ID = "0123456789abcdef01234567"

REQUEST_ID_PATTERN = f"^{REQUEST_ID.pattern}$"
RESPONSE_HEADERS = {
    "X-Request-Id": {
        "required": True,
        "description": "Id of the request, as in the log.",
        "schema": {"type": "string", "pattern": REQUEST_ID_PATTERN},
    }
}
RETRY_HEADERS = {
    "Retry-After": {
        "required": True,
        "description": "Seconds until the request should be sent again.",
        "schema": {"type": "integer"},
    }
}
REQUEST_ID_HEADER = {
    "name": "X-Request-Id",
    "in": "header",
    "description": f"Returned in the response if it matches `{REQUEST_ID_PATTERN}`; otherwise a new one is generated.",
    "schema": {"type": "string"},
}
TIMEOUT_HEADER = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "description": "Maximum duration of the call in milliseconds; it can only shorten the server's own limit.",
    "schema": {"type": "integer", "minimum": 1},
}
MODEL_PARAMETER = {
    "name": "model",
    "in": "query",
    "description": "Name of the model; the default model for the task if absent.",
    "schema": {"type": "string"},
}
LENGTH_PARAMETER = {
    "in": "header",
    "description": "Length in bytes of the JSON at the beginning of the body; the whole body if absent.",
    "schema": {"type": "integer", "minimum": 1},
}


class DeclaredErrors:
    """All errors that a route can return."""

    def __init__(self, codes: Sequence[ErrorCode], error_format: ErrorFormat) -> None:
        """`codes` are those of the route itself, written in its error format."""
        self._by_status: dict[int, list[tuple[ErrorCode, ErrorFormat]]] = {}
        formats = (*((code, NATIVE_ERRORS) for code in HEAD_ERRORS), *((code, error_format) for code in codes))
        for code, format_of_code in formats:
            self._by_status.setdefault(ERRORS[code].status, []).append((code, format_of_code))

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """Return the responses as FastAPI expects them; `complete` adds the rest."""
        declared: dict[int | str, dict[str, Any]] = {
            status: {
                "description": ", ".join(dict.fromkeys(code for code, _ in formats)),
                "model": functools.reduce(operator.or_, dict.fromkeys(one.response for _, one in formats)),
                "headers": RESPONSE_HEADERS | (RETRY_HEADERS if status == 503 else {}),
            }
            for status, formats in sorted(self._by_status.items())
        }
        # Without a default, FastAPI declares its own response for validation errors.
        declared["default"] = {"description": "Not in the document."}
        return declared

    def complete(self, responses: dict[str, dict[str, Any]]) -> None:
        """Add an example of each code to its status. FastAPI itself would drop the nulls from
        examples.
        """
        del responses["default"]
        for status, formats in self._by_status.items():
            # A code with two formats is shown in the endpoint's own, which comes last.
            examples = {code: _example(code, one) for code, one in formats}
            responses[str(status)]["content"][JSON]["examples"] = examples


PATH_PARAMETERS = {
    "model_id": "Name of the model.",
    "model_name": "Name of the model.",
    "model_version": "Version of the model; there is only 1.",
}


def describe_path_parameters(operation: dict[str, Any]) -> None:
    """Add descriptions to the path parameters that FastAPI has declared."""
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            parameter["description"] = PATH_PARAMETERS[parameter["name"]]


def declared_request(
    body_type: type[BaseModel] | None, body_format: BodyFormat, *, model_in_query: bool
) -> dict[str, Any]:
    """Return the OpenAPI declaration of headers, query, and bodies that are not JSON."""
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
    """Return the JSON Schema of a body as a form; each field is one text or number, or absent."""
    schema = body_type.model_json_schema()
    for name, field in schema["properties"].items():
        kinds = field.pop("anyOf", [field])
        field.pop("default", None)
        schema["properties"][name] = field | next(kind for kind in kinds if kind["type"] not in ("null", "array"))
    names = ("type", "properties", "required", "additionalProperties", "anyOf")
    return {name: schema[name] for name in names if name in schema}


def _example(code: ErrorCode, error_format: ErrorFormat) -> Mapping[str, Any]:
    error = ApiError(code)
    message = error.message({})
    return {"summary": message, "value": orjson.loads(error_format.write(error, message, None, EXAMPLE_REQUEST_ID))}
