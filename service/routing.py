"""Routes that read, limit and check their JSON body themselves, and nothing else: the least that a call can cost.

FastAPI declares each route from its endpoint's signature and puts it into OpenAPI; the call itself goes past FastAPI's
own parsing, which answers 500 to some bad bodies and sends others back whole.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from service.answers import ErrorAnswer
from service.bodies import FORM, JSON, BodyFormat, receive_body
from service.calls import RECORD, Call
from service.errors import ERRORS, ApiError, ErrorCode, ErrorWriter

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
LENGTH_HEADER = {
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
OWN_FORMAT = BodyFormat()


class JsonRoute(APIRoute):
    """A route whose endpoint takes `call`, path parameters, and `body` where it declares one."""

    write_error: ErrorWriter
    body_format: BodyFormat

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
                arguments["body"] = await receive_body(call, self.body_format, self._body_type)
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
    body_format: BodyFormat = OWN_FORMAT,
    model_in_query: bool = False,
) -> None:
    """Add one route.

    Args:
        app: where to.
        method: GET or POST.
        path: its path.
        endpoint: its docstring's first sentence is the summary in OpenAPI; a body is read where it takes `body`.
        answer: what a 200 looks like.
        errors: what else it can answer, besides what every route of its kind can.
        response_class: tells the media type of a 200.
        also_answers: other media types of a 200.
        error_shape: how it writes its errors.
        body_format: how its body is sent.
        model_in_query: `?model=` names the model.
    """
    reads_body = "body" in inspect.signature(endpoint).parameters
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
        openapi_extra=_declared_request(endpoint, body_format, model_in_query=model_in_query),
        route_class_override=JsonRoute,
    )
    route = app.router.routes[-1]
    assert isinstance(route, JsonRoute)
    route.write_error = error_shape.write
    route.body_format = body_format


class UnknownRoutes(BaseRoute):
    """What lies below a family's path without being one of its routes: 404 in the family's shape."""

    def __init__(self, prefix: str, error_shape: ErrorShape) -> None:
        self._prefix = prefix
        self._error_shape = error_shape

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # In part, so that a route which has the path, though not the method, comes first.
        is_below = scope["type"] == "http" and scope["path"].startswith(self._prefix)
        return (Match.PARTIAL if is_below else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RECORD].write_error = self._error_shape.write
        raise ApiError("not_found")


def _declared_request(endpoint: Callable[..., Any], body_format: BodyFormat, *, model_in_query: bool) -> dict[str, Any]:
    """What OpenAPI is told of a request beside its JSON."""
    body = inspect.signature(endpoint).parameters.get("body")
    parameters: list[dict[str, Any]] = [REQUEST_ID_HEADER]
    if body is not None:
        parameters.append(TIMEOUT_HEADER)
    if model_in_query:
        parameters.append(MODEL_PARAMETER)
    if body_format.length_header is not None:
        parameters.append(LENGTH_HEADER | {"name": body_format.length_header})
    declared: dict[str, Any] = {"parameters": parameters}
    others = [kind for kind in body_format.media_types if kind not in ("", JSON)]
    if body is not None and others:
        form = {"$ref": f"#/components/schemas/{body.annotation.__name__}"}
        binary = {"type": "string", "format": "binary"}
        declared["requestBody"] = {"content": {kind: {"schema": form if kind == FORM else binary} for kind in others}}
    return declared


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
