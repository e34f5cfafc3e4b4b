"""Routes that read, limit and check their JSON body themselves, and nothing else: the least that a call can cost.

FastAPI declares each route from its endpoint's signature and puts it into OpenAPI; the call itself goes past FastAPI's
own parsing, which answers 500 to some bad bodies and sends others back whole.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from service.bodies import JSON, BodyFormat, receive_body
from service.calls import RECORD, Call
from service.errors import ApiError, ErrorCode, ErrorWriter
from service.openapi import ANSWER_HEADERS, OWN_ERRORS, DeclaredErrors, ErrorShape, declared_request

# Every route can answer with these.
COMMON_ERRORS: tuple[ErrorCode, ...] = ("internal",)
# A route that asks whether the service is ready can answer with these,
UNAVAILABLE_ERRORS: tuple[ErrorCode, ...] = ("loading", "draining", "engine_dead")
# and so can every route that reads a body.
BODY_ERRORS: tuple[ErrorCode, ...] = (
    "malformed_request",
    "malformed_json",
    "client_too_slow",
    "headers_too_large",
    "body_too_large",
    "overloaded",
    "unsupported_media_type",
    "invalid_parameter",
    *UNAVAILABLE_ERRORS,
)
# For routes to declare: what one that hands texts to the engine can answer with,
ENGINE_ERRORS: tuple[ErrorCode, ...] = ("empty_input", "overloaded", "deadline_exceeded")
# and one that does a task with a model which the call names.
TASK_ERRORS: tuple[ErrorCode, ...] = ("model_not_found", "input_too_long", "unsupported_task", *ENGINE_ERRORS)

OWN_FORMAT = BodyFormat()
LARGE_BYTES = 65_536  # more than this a transport does not like to hold for its reader


def body_type_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """What an endpoint reads; None where it takes no `body`."""
    body = inspect.signature(endpoint).parameters.get("body")
    return body.annotation if body else None


class JsonRoute(APIRoute):
    """A route whose endpoint takes `call`, path parameters, and `body` where it declares one."""

    write_error: ErrorWriter
    body_format: BodyFormat
    errors: DeclaredErrors
    always_refuses: bool

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._body_type = body_type_of(endpoint)
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
                call.service.check_ready()
                call.limit_time()
                arguments["body"] = await receive_body(call, self.body_format, self._body_type)
            response = await self.endpoint(call=call, **arguments)
            call.count_success()
            await response(scope, receive, _until_read(send))


def _until_read(send: Send) -> Send:
    """Send a large last part so that it returns when most was read: until then the call keeps its place.

    uvicorn waits for the reader before it takes more, and so not after the last part.
    """

    async def send_and_wait(message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last and len(message["body"]) > LARGE_BYTES:
            await send({**message, "more_body": True})
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return send_and_wait


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
    body_type = body_type_of(endpoint)
    declared = DeclaredErrors((*errors, *COMMON_ERRORS, *(BODY_ERRORS if body_type else ())), error_shape)
    is_json = response_class.media_type == JSON
    kinds = also_answers if is_json else (response_class.media_type, *also_answers)
    app.router.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_model=answer,
        response_class=JSONResponse if is_json else Response,  # FastAPI declares errors in the media type of a 200
        responses={
            200: {"headers": ANSWER_HEADERS, "content": {kind: {} for kind in kinds}},
            **declared.responses(),
        },
        summary=(endpoint.__doc__ or "").split("\n")[0].rstrip("."),
        openapi_extra=declared_request(body_type, body_format, model_in_query=model_in_query),
        route_class_override=JsonRoute,
    )
    route = app.router.routes[-1]
    assert isinstance(route, JsonRoute)
    route.write_error = error_shape.write
    route.body_format = body_format
    route.errors = declared
    route.always_refuses = inspect.signature(endpoint).return_annotation is NoReturn


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


class DescribedApp(FastAPI):
    """An app whose document has what FastAPI does not know of its routes."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            paths = super().openapi()["paths"]
            for route in self.routes:
                if isinstance(route, JsonRoute):
                    for method in route.methods or ():
                        responses = paths[route.path_format][method.lower()]["responses"]
                        route.errors.complete(responses)
                        if route.always_refuses:
                            del responses["200"]
        assert self.openapi_schema is not None
        return self.openapi_schema
