"""Declaration of an endpoint: all that the transport needs to call and to describe it (OpenAPI)."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal
from urllib.parse import quote

import orjson
from fastapi import Depends, Path, Query
from pydantic import BaseModel, Field

from sightline.service.api_errors import ERRORS, ApiError, ErrorCode, ErrorType, complete_message
from sightline.service.inference import call as inference_call
from sightline.service.inference.streaming import Stream, StreamedSequence, StreamEnd, StreamToken
from sightline.service.keys import Role

JSON, FORM, EVENTS = "application/json", "application/x-www-form-urlencoded", "text/event-stream"
NDJSON = "application/x-ndjson"  # JSON lines
MULTIPART = "multipart/form-data"
HTML, SVG, BINARY = "text/html", "image/svg+xml", "application/octet-stream"
IN_QUERY = {"model", "type", "source_lang", "target_lang"}  # parameters that an endpoint may read from the query
CALL = "sightline.call"  # key of the call in the ASGI scope


def described(text: str) -> Any:
    """Return the description of a path parameter; FastAPI alone would repeat it in the schema."""
    return Path(description=text, json_schema_extra=lambda schema: schema.pop("description"))


# Arguments of handlers. The body is another one. The route provides those that FastAPI must not
# take for parameters of the request.
_PROVIDED = Depends(lambda: None)
Call = Annotated[inference_call.Call, _PROVIDED]
Headers = Annotated[Mapping[bytes, bytes], _PROVIDED]
ModelInQuery = Annotated[str | None, _PROVIDED]
Tail = Annotated[bytes, _PROVIDED]  # bytes of the body after its JSON
TypeInQuery = Annotated[str | None, Query(description="`source` (default) or `target`.")]
LanguageInQuery = Annotated[str | None, Query(description="Code of the language.")]
PathModel = Annotated[str, described("Name of the model.")]

# An endpoint that needs the models to be ready can also answer with these,
UNAVAILABLE_ERRORS: tuple[ErrorCode, ...] = ("loading", "draining", "engine_dead")
# and one that reads a body with these.
BODY_ERRORS: tuple[ErrorCode, ...] = (
    "malformed_request",
    "malformed_json",
    "client_too_slow",
    "headers_too_large",
    "body_too_large",
    "overloaded",
    "rate_limit_exceeded",
    "unsupported_media_type",
    *UNAVAILABLE_ERRORS,
)
# Endpoints declare these: errors of calls that pass texts to the engine,
ENGINE_ERRORS: tuple[ErrorCode, ...] = ("empty_input", "overloaded", "deadline_exceeded")
# and of calls that name a model and use it for a task.
TASK_ERRORS: tuple[ErrorCode, ...] = ("model_not_found", "input_too_long", "unsupported_task", *ENGINE_ERRORS)
# Not every model supports all parameters,
PARAMETER_ERRORS: tuple[ErrorCode, ...] = (*TASK_ERRORS, "unsupported_parameter")
# and vectors and attention maps can be large.
OUTPUT_ERRORS: tuple[ErrorCode, ...] = (*PARAMETER_ERRORS, "response_too_large")


@dataclass(frozen=True)
class BodyFormat:
    """The form in which the body of an endpoint is sent."""

    media_types: Sequence[str] = (JSON,)  # "" is that of a request which names none
    length_header: str | None = None  # number of bytes that are JSON, all if absent; the rest is the handler's `tail`
    is_optional: bool = False  # an empty body is an empty object
    is_form: bool = True  # a body of the type of a form is one, and not JSON


JSON_OR_FORM = BodyFormat((JSON, FORM, MULTIPART))
WITH_FILE = BodyFormat((MULTIPART,))
UNTYPED_JSON = BodyFormat((JSON, ""))  # of APIs whose clients send no Content-Type
CURL_JSON = BodyFormat((*UNTYPED_JSON.media_types, FORM), is_form=False)  # `curl -d` names the type of a form


class Error(BaseModel):
    code: Annotated[str, Field(description="Error code; it decides the HTTP status.")]
    type: Annotated[ErrorType, Field(description="Group that the code belongs to.")]
    message: Annotated[str, Field(description="Explanation in full sentences; complete in itself.")]
    param: Annotated[str | None, Field(description="Path of the value at fault; null if no value is.")]
    request_id: Annotated[str, Field(description="Request id, as in `X-Request-Id` and in the log.")]


class ErrorResponse(BaseModel):
    error: Annotated[Error, Field(description="The error.")]


@dataclass(frozen=True)
class ErrorFormat:
    """The form in which an API returns errors; codes are the same in every API."""

    # Writes the body of an error: its message and its parameter with the API's own names, and the
    # request id.
    write: Callable[[ApiError, str, str | None, str], bytes]
    response: type[BaseModel]  # what is written, for OpenAPI
    invalid_status: int = 422  # of requests whose values are not allowed

    def status(self, code: ErrorCode) -> int:
        """Return the HTTP status of an error."""
        status = ERRORS[code].status
        return self.invalid_status if status == 422 else status


def _native_error(error: ApiError, message: str, param: str | None, request_id: str) -> bytes:
    content = {"code": error.code, "type": error.kind.type, "message": complete_message(message, param)}
    return orjson.dumps({"error": content | {"param": param, "request_id": request_id}})


NATIVE_ERRORS = ErrorFormat(_native_error, ErrorResponse)


@dataclass(frozen=True)
class Raw:
    """A response that is not JSON, or has headers of its own."""

    body: bytes
    media_type: str | None  # None for a status without a body
    status: int = 200
    headers: Mapping[str, str] | None = None


def attachment(data: bytes, name: str, headers: Mapping[str, str] | None = None) -> Raw:
    """Return a file that a browser saves under a name."""
    disposition = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
    return Raw(data, BINARY, 200, {"content-disposition": disposition, **(headers or {})})


def prefers(media_type: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return True if the header Accept names a media type and does not prefer JSON to it."""
    weights: dict[str, float] = {}
    for media_range in headers.get(b"accept", b"").decode("latin-1").split(","):
        kind, *parameters = (part.strip().lower() for part in media_range.split(";"))
        weights[kind] = next((_weight(parameter[2:]) for parameter in parameters if parameter.startswith("q=")), 1.0)
    return weights.get(media_type, 0.0) > 0 and weights[media_type] >= weights.get(JSON, 0.0)


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


class EventEncoder:
    """Base of the writers of a stream's events in the form of an API, by default as data events.

    An event is sent as soon as it is written, so it must be complete: a server-sent event with its
    blank line (`event_of`), or a JSON line (`line_of`).
    """

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        raise NotImplementedError

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        raise NotImplementedError

    def close(self, stream: Stream) -> bytes:
        """Write what comes after the last event."""
        return b""

    def error(self, body: bytes) -> bytes:
        """Write an error, which ends the stream."""
        return b"data: " + body + b"\n\n"


@dataclass(frozen=True)
class EventStream:
    """A response of events, each sent as it arrives."""

    stream: Stream
    encoder: EventEncoder
    media_type: str = f"{EVENTS}; charset=utf-8"  # of what the encoder writes; or `NDJSON`


def event_of(content: Any) -> bytes:
    """Write a server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


def line_of(content: Any) -> bytes:
    """Write a JSON line."""
    return to_json(content) + b"\n"


def to_json(content: Any) -> bytes:
    """Write JSON; dataclasses and NumPy arrays are allowed anywhere in it."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


@dataclass(frozen=True)
class Endpoint:
    """One endpoint.

    The handler takes `call`, the path's parameters, and by name what else it declares: `body`, a
    Pydantic model; one of `IN_QUERY`; `headers`; `tail`, the bytes after the JSON.
    It returns an object that becomes JSON, a `Raw`, or an `EventStream`. The first sentence of its
    docstring is the summary in OpenAPI.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    handler: Callable[..., Awaitable[Any]]
    response: Any = None  # type of the JSON of a 200
    errors: Sequence[ErrorCode] = ()  # beside those that every endpoint of its kind can answer with
    media_types: Sequence[str] = (JSON,)  # of a 200
    error_format: ErrorFormat = NATIVE_ERRORS
    body_format: BodyFormat = BodyFormat()
    # Functions of path parameters that the handler does not take; they raise errors.
    dependencies: Sequence[Callable[..., Awaitable[None]]] = ()
    # Parameters in the query are not checked: monitors and links add some of their own.
    ignores_query: bool = False
    is_open: bool = False  # needs no key
    role: Role = "use"  # that a key needs
    key_field: str | None = None  # field of the body that can have the key, if no header has it
    name: str | None = None  # in the OpenAPI document, if it is not that of the handler
    tags: Sequence[str] = ("sightline",)  # in the OpenAPI document: the APIs that have the endpoint
    with_file: "Endpoint | None" = None  # takes its place if the body is a multipart form

    @cached_property
    def body_type(self) -> type[BaseModel] | None:
        """Type of the body; None if the handler takes none."""
        return self._parameters["body"].annotation if "body" in self._parameters else None

    @cached_property
    def takes(self) -> frozenset[str]:
        """Names of the other arguments that do not come from the path."""
        return frozenset({*IN_QUERY, "headers", "tail"}.intersection(self._parameters))

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.handler).parameters
