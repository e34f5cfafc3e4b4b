"""Parts of the OpenAPI document that FastAPI cannot derive: headers, forms, and errors by code."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sightline.service.api.endpoint import (
    BINARY,
    BODY_ERRORS,
    FORM,
    JSON,
    MULTIPART,
    NATIVE_ERRORS,
    Endpoint,
    ErrorFormat,
)
from sightline.service.api_errors import ApiError, ErrorCode
from sightline.service.http.http_call import POLLED_ROUTES, REQUEST_ID

# Any request can fail before its head is complete. Such errors have the native format.
HEAD_ERRORS: tuple[ErrorCode, ...] = ("malformed_request", "client_too_slow", "headers_too_large")
REFERENCE = "#/components/schemas/{model}"
EXAMPLE_REQUEST_ID = "0123456789abcdef01234567"

KEY_USE = "API key, if the service has a file of keys."
REQUEST_ID_PATTERN = f"^{REQUEST_ID.pattern}$"


def _header(description: str, **schema: Any) -> dict[str, Any]:
    """Declare a header that a response always has."""
    return {"required": True, "description": description, "schema": schema}


RESPONSE_HEADERS = {
    "X-Request-Id": _header("Id of the request, as in the log.", type="string", pattern=REQUEST_ID_PATTERN)
}
ERROR_HEADERS = {"X-Error-Code": _header("Error code, for logs of proxies.", type="string")}
RETRY_HEADERS = {"Retry-After": _header("Seconds until the request should be sent again.", type="integer")}
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


# The two schemes of a key that every API accepts; `access.py` reads the key.
KEY_SCHEMES = (
    HTTPBearer(scheme_name="bearer", description=KEY_USE, auto_error=False),
    APIKeyHeader(name="X-API-Key", scheme_name="header", description=KEY_USE, auto_error=False),
)

# Codes of errors with the same status, each with its form.
Errors = Sequence[tuple[ErrorCode, ErrorFormat]]


def errors_of(endpoint: Endpoint) -> dict[int, Errors]:
    """Return the errors of an endpoint by status."""
    own = (*endpoint.errors, "internal", *(BODY_ERRORS if endpoint.body_type else ()))
    if endpoint.path not in POLLED_ROUTES:
        own = (*own, "misdirected_request")
    if not endpoint.is_open:
        own = (*own, "unauthorized", *(("forbidden",) if endpoint.role == "admin" else ()))
    if not endpoint.ignores_query:
        own = (*own, "invalid_parameter")
    by_status: dict[int, list[tuple[ErrorCode, ErrorFormat]]] = {}
    errors = (*((code, NATIVE_ERRORS) for code in HEAD_ERRORS), *((code, endpoint.error_format) for code in own))
    for code, error_format in errors:
        by_status.setdefault(error_format.status(code), []).append((code, error_format))
    return dict(sorted(by_status.items()))


def declared_errors(endpoint: Endpoint) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an endpoint's errors by status, which refer to shared ones."""
    return {
        status: {"$ref": f"#/components/responses/{_name_of(errors)}", "description": ", ".join(_codes_of(errors))}
        for status, errors in errors_of(endpoint).items()
    }


def shared_errors(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the error responses of endpoints by name, each once."""
    shared = {
        _name_of(errors): (status, errors) for endpoint in endpoints for status, errors in errors_of(endpoint).items()
    }
    return {
        name: {
            "description": ", ".join(_codes_of(errors)),
            "headers": RESPONSE_HEADERS | ERROR_HEADERS | (RETRY_HEADERS if status in (429, 503) else {}),
            "content": {
                JSON: {
                    "schema": _schema_of(errors),
                    # A code with two formats is shown in the endpoint's own, which comes last.
                    "examples": {code: _example(code, error_format) for code, error_format in errors},
                }
            },
        }
        for name, (status, errors) in sorted(shared.items())
    }


def _codes_of(errors: Errors) -> list[str]:
    return list(dict.fromkeys(code for code, _ in errors))


def _types_of(errors: Errors) -> list[str]:
    return list(dict.fromkeys(error_format.response.__name__ for _, error_format in errors))


def _name_of(errors: Errors) -> str:
    return ".".join([*_types_of(errors), *_codes_of(errors)])


def _schema_of(errors: Errors) -> dict[str, Any]:
    references = [{"$ref": REFERENCE.format(model=name)} for name in _types_of(errors)]
    return references[0] if len(references) == 1 else {"anyOf": references}


def schemas_of_errors(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the JSON Schemas of all errors of endpoints, by name."""
    types = dict.fromkeys(form.response for form in (NATIVE_ERRORS, *(endpoint.error_format for endpoint in endpoints)))
    models: Any = [(response, "serialization") for response in types]
    schemas: dict[str, Any] = models_json_schema(models, ref_template=REFERENCE)[1]["$defs"]
    return schemas


def declared_request(endpoint: Endpoint) -> dict[str, Any]:
    """Return the OpenAPI declaration of headers, query, and bodies that are not JSON."""
    body_type, body_format = endpoint.body_type, endpoint.body_format
    parameters: list[dict[str, Any]] = [REQUEST_ID_HEADER]
    if body_type is not None:
        parameters.append(TIMEOUT_HEADER)
    if "model" in endpoint.takes:
        parameters.append(MODEL_PARAMETER)
    if body_format.length_header is not None:
        parameters.append(LENGTH_PARAMETER | {"name": body_format.length_header})
    declared: dict[str, Any] = {"parameters": parameters}
    if not endpoint.is_open:
        declared["security"] = [{}]  # beside those of `KEY_SCHEMES`: a service without keys asks for none
    others = [
        kind for kind in body_format.media_types if kind not in ("", JSON) and (kind != FORM or body_format.is_form)
    ]
    if body_type is not None and others:
        schemas = {kind: _form_schema(body_type) if kind in (FORM, MULTIPART) else schema_of(kind) for kind in others}
        declared["requestBody"] = {"content": {kind: {"schema": schema} for kind, schema in schemas.items()}}
    if endpoint.with_file is not None:
        declared["requestBody"] = declared_request(endpoint.with_file)["requestBody"]
    if body_format.is_optional:
        declared.setdefault("requestBody", {})["required"] = False
    return declared


def schema_of(media_type: str) -> dict[str, Any]:
    """Return the JSON Schema of a body that is neither JSON nor a form: a text, or bytes."""
    return {"type": "string", "format": "binary"} if media_type == BINARY else {"type": "string"}


def _form_schema(body_type: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of a body as a form; each field is one text or number, or absent."""
    schema, properties = body_type.model_json_schema(), dict[str, Any]()
    for name, field in schema["properties"].items():
        kinds = field.pop("anyOf", [field])
        field.pop("default", None)
        for kind in [kind for kind in kinds if kind.get("type") not in (None, "null", "array")][:1]:
            properties[name] = field | kind  # others cannot be in a form
    schema["properties"] = properties
    names = ("type", "properties", "required", "additionalProperties")
    return {name: schema[name] for name in names if name in schema}


def _example(code: ErrorCode, error_format: ErrorFormat) -> Mapping[str, Any]:
    error = ApiError(code)
    message = error.message({})
    return {"summary": message, "value": orjson.loads(error_format.write(error, message, None, EXAMPLE_REQUEST_ID))}
