"""Routes that read, limit and check their JSON body themselves, and nothing else: the least that a call can cost.

FastAPI declares each route from its endpoint's signature and puts it into OpenAPI; the call itself goes past FastAPI's
own parsing, which answers 500 to some bad bodies and sends others back whole.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.answers import ErrorAnswer
from service.calls import RECORD, Call
from service.errors import ERRORS, ApiError, ClientGoneError, ErrorCode, ErrorWriter

Body = TypeVar("Body", bound=BaseModel)

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
MAX_FORM_FIELDS = 64

# Every route can answer with these.
COMMON_ERRORS: tuple[ErrorCode, ...] = ("internal",)
# Every route that reads a body can answer with these as well.
BODY_ERRORS: tuple[ErrorCode, ...] = (
    "malformed_json",
    "model_not_found",
    "client_too_slow",
    "body_too_large",
    "unsupported_media_type",
    "invalid_parameter",
    "overloaded",
)

REQUEST_ID_HEADER = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Echoed in the answer where it matches the pattern; otherwise another is made.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
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


@dataclass(frozen=True)
class ErrorShape:
    """How a family of routes writes its errors; status and code are the same at every door."""

    write: ErrorWriter
    answer: type[BaseModel]  # what is written, for OpenAPI


OWN_ERRORS = ErrorShape(ApiError.body, ErrorAnswer)


class JsonRoute(APIRoute):
    """A route whose endpoint takes `call`, path parameters, and `body` where it declares one."""

    write_error: ErrorWriter
    media_types: Sequence[str]  # of its body

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        body = inspect.signature(endpoint).parameters.get("body")
        self._body_type: type[BaseModel] | None = body.annotation if body else None
        self.app = self._serve

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RECORD].write_error = self.write_error  # before the method is looked at, which may be the first error
        await super().handle(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as resources:
            call = Call(scope, receive, send, resources)
            call.record.route = self.path
            arguments = dict(scope["path_params"])
            if self._body_type is not None:
                if call.service.refusal is not None:
                    raise call.service.refusal
                call.limit_time()
                data = await read_body(call, self.media_types)
                if _media_type(call) == FORM:  # away from the event loop: a megabyte of percent signs takes a while
                    arguments["body"] = await asyncio.to_thread(parse_form, data, self._body_type)
                else:
                    arguments["body"] = parse_body(data, self._body_type)
            response = await self.endpoint(call=call, **arguments)
            await response(scope, receive, send)


def add_route(
    app: FastAPI,
    method: str,
    path: str,
    endpoint: Callable[..., Any],
    answer: Any = None,
    errors: Sequence[ErrorCode] = (),
    response_class: type[Response] = JSONResponse,
    also_answers: Sequence[str] = (),
    error_shape: ErrorShape = OWN_ERRORS,
    takes_forms: bool = False,
    model_in_query: bool = False,
) -> None:
    """Add one route.

    Args:
        app: where to.
        method: GET or POST; a POST reads a JSON body.
        path: its path.
        endpoint: its docstring's first sentence is the summary in OpenAPI.
        answer: what a 200 looks like.
        errors: what else it can answer, besides what every route of its kind can.
        response_class: tells the media type of a 200.
        also_answers: other media types of a 200.
        error_shape: how it writes its errors.
        takes_forms: whether the body may be an HTML form's instead of JSON.
        model_in_query: `?model=` names the model.
    """
    reads_body = method == "POST"
    parameters = [REQUEST_ID_HEADER]
    if reads_body:
        parameters.append(TIMEOUT_HEADER)
    if model_in_query:
        parameters.append(MODEL_PARAMETER)
    extra: dict[str, Any] = {"parameters": parameters}
    if takes_forms:
        extra["requestBody"] = {"content": {FORM: {"schema": {"$ref": _reference(endpoint)}}}}
    codes = (*errors, *COMMON_ERRORS, *(BODY_ERRORS if reads_body else ()))
    app.router.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_model=answer,
        response_class=response_class,
        responses={
            200: {"content": {media_type: {} for media_type in also_answers}},
            **_declared(codes, error_shape.answer),
        },
        summary=(endpoint.__doc__ or "").split("\n")[0].rstrip("."),
        openapi_extra=extra,
        route_class_override=JsonRoute,
    )
    route = app.router.routes[-1]
    assert isinstance(route, JsonRoute)
    route.write_error = error_shape.write
    route.media_types = (JSON, FORM) if takes_forms else (JSON,)


def _reference(endpoint: Callable[..., Any]) -> str:
    """Where OpenAPI has the schema of an endpoint's body."""
    return f"#/components/schemas/{inspect.signature(endpoint).parameters['body'].annotation.__name__}"


def _declared(codes: Sequence[ErrorCode], answer: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(ERRORS[code].status, []).append(code)
    declared: dict[int | str, dict[str, Any]] = {
        status: {"model": answer, "description": ", ".join(dict.fromkeys(names))}
        for status, names in sorted(by_status.items())
    }
    # Without it FastAPI declares an answer of its own for whatever it thinks that it will check.
    declared["default"] = {"model": answer, "description": "Every error has this body."}
    return declared


async def read_body(call: Call, media_types: Sequence[str]) -> bytes:
    """The whole body of a call, which must say that it is of one of these types.

    Raises:
        ApiError: `unsupported_media_type`, `body_too_large`, `client_too_slow`.
        ClientGoneError: the client left before it had sent everything.
    """
    _check_media_type(call, media_types)
    limit = call.service.settings.max_body_bytes
    too_large = ApiError("body_too_large", f"The body is larger than {limit} bytes.")
    announced = call.headers.get("content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(call.service.settings.body_timeout_s):
            while True:
                message = await call.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ApiError("client_too_slow") from None
    call.num_bytes = len(body)
    return bytes(body)


def _media_type(call: Call) -> str:
    return call.headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_media_type(call: Call, media_types: Sequence[str]) -> None:
    parameters = [part.strip().lower() for part in call.headers.get("content-type", "").split(";")[1:]]
    charsets = [part.removeprefix("charset=").strip('"') for part in parameters if part.startswith("charset=")]
    encoding = call.headers.get("content-encoding", "identity").lower()
    if _media_type(call) not in media_types or any(one != "utf-8" for one in charsets) or encoding != "identity":
        message = f"Send Content-Type: {' or '.join(media_types)}, in UTF-8 and without Content-Encoding."
        raise ApiError("unsupported_media_type", message)


def parse_body(data: bytes, body_type: type[Body]) -> Body:
    """Parse and check a body.

    Of a key that stands twice in an object the last counts, as in every JSON reader at hand.

    Raises:
        ApiError: `malformed_json`, or the first thing that is not allowed.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise ApiError("malformed_json") from None
    if not isinstance(document, dict):
        raise ApiError("invalid_parameter", "The body must be a JSON object.")
    return check_body(document, body_type)


def parse_form(data: bytes, body_type: type[Body]) -> Body:
    """Parse and check a form; a number is its digits. Of a field that stands twice the last counts.

    Raises:
        ApiError: `malformed_json`, or the first thing that is not allowed.
    """
    try:
        pairs = parse_qsl(
            data.decode(), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=MAX_FORM_FIELDS
        )
    except ValueError:
        raise ApiError("malformed_json", "The body is not a form in UTF-8.") from None
    return _checked(lambda: body_type.model_validate_strings(dict(pairs), strict=False))


def check_body(document: dict[str, Any], body_type: type[Body]) -> Body:
    """Check a JSON object.

    Raises:
        ApiError: the first thing that is not allowed.
    """
    return _checked(lambda: body_type.model_validate(document))


def _checked(validate: Callable[[], Body]) -> Body:
    try:
        return validate()
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """The first of pydantic's complaints, without the value that it is about."""
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    param = path_of((*first["loc"], *context.get("path", ())))
    code: ErrorCode = "invalid_parameter"
    if first["type"] in ERRORS:  # one of our own
        code = first["type"]  # type: ignore[assignment]
    message = context.get("message") or f"{first['msg']}."
    return ApiError(code, message, param=param or None)


def path_of(location: Sequence[str | int]) -> str:
    """`("parameters", "stop", 1)` as `parameters.stop[1]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
