"""Serve POST /v1/generate as an ordinary FastAPI handler over the fake runner.

Usage: `python -m bench.fastapi_edge`. It is the baseline for the dispatcher of `service/http`:
FastAPI reads, parses and validates the body and calls the handler. Limits that FastAPI lacks are
added in the usual ways: a request class that enforces the body limit, a handler for validation
errors, and ASGI middleware for the access log.
"""

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.fake_server import load_fake
from service.api.endpoint import CALL
from service.api.generate import GenerateBody
from service.app import create_app
from service.errors import ApiError
from service.fields import path_of, paths_of
from service.http.call import HttpCall
from service.http.dispatch import CallLog
from service.inference.generate import generate
from service.inference.service import Service
from service.logs import configure_logging
from service.server import DrainingServer
from service.settings import Settings, read_settings


class LimitedRequest(Request):
    """Request that rejects a body above the limit while reading it."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit, parts, size = self.app.state.service.settings.max_body_bytes, [], 0
            async for part in self.stream():
                size += len(part)
                if size > limit:
                    raise ApiError("body_too_large", f"The body is larger than {limit} bytes.")
                parts.append(part)
            self._body = b"".join(parts)
        return self._body


class LimitedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def limited(request: Request) -> Response:
            return await handler(LimitedRequest(request.scope, request.receive))

        return limited


class Deadlines:
    """ASGI middleware that sets the deadline of each call, and notices when its client leaves."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._seconds = service.settings.request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            call: HttpCall = scope[CALL]
            call.deadline = call.started + self._seconds
            if call.exchange is not None:
                call.exchange.on_lost = call.on_client_gone
        await self._app(scope, receive, send)


def create_ordinary_app(settings: Settings) -> FastAPI:
    inner = create_app(settings, load_fake, sys.exit)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner.router.lifespan_context(inner):
            yield

    app = FastAPI(lifespan=lifespan, telemetry={"tracing": False, "metrics": False, "logs": False})
    service: Service = inner.state.service
    app.state.service = service
    app.router.route_class = LimitedRoute

    @app.post("/v1/generate")
    async def generate_text(body: GenerateBody, request: Request) -> Response:
        call: HttpCall = request.scope[CALL]
        call.field_names = paths_of(GenerateBody)
        service.check_ready()
        result = await generate(call, await call.model(body.model, "generate"), body.inputs, body.parameters)
        call.observe_latency()
        return Response(orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        service.check_ready()
        return {"status": "ready"}

    @app.exception_handler(ApiError)
    async def handle_api_error(request: Request, error: ApiError) -> Response:
        call: HttpCall = request.scope[CALL]
        call.code = error.code
        return Response(call.error_body(error), error.kind.status, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        path = path_of([part for part in first["loc"] if part != "body"]) or None
        return await handle_api_error(request, ApiError("invalid_parameter", f"{first['msg']}.", path=path))

    app.add_middleware(Deadlines, service=service)
    app.add_middleware(CallLog, service=service)
    return app


def main() -> None:
    settings = read_settings([])
    configure_logging(settings.log_level)
    DrainingServer(create_ordinary_app(settings), settings).run()


if __name__ == "__main__":
    main()
