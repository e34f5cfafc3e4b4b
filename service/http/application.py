"""The FastAPI application and its routes.

FastAPI describes the endpoints, and its router can call them. The middleware of
`service.http.dispatch` calls them without that router.
"""

import functools
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from service.api.endpoint import CALL, JSON, Endpoint, ErrorFormat
from service.errors import ERRORS, ApiError, ErrorCode
from service.http.dispatch import respond
from service.http.openapi import RESPONSE_HEADERS, declared_errors, declared_request, schemas_of_errors
from service.http.routing import RouteTable


class EndpointResponse(Response):
    """Calls an endpoint and sends its response."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope[CALL], self._endpoint, scope["path_params"], send)


class EndpointRoute(APIRoute):
    """An endpoint as a route, which reads the body and writes the response as `respond` does."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.declared = endpoint
        is_json = JSON in endpoint.media_types
        super().__init__(
            endpoint.path,
            endpoint.handler,
            methods=[endpoint.method],
            name=endpoint.name,
            summary=(endpoint.handler.__doc__ or "").split("\n")[0].rstrip("."),
            dependencies=[Depends(one) for one in endpoint.dependencies],
            response_model=endpoint.response,
            response_class=JSONResponse if is_json else Response,
            responses={
                200: {
                    "headers": RESPONSE_HEADERS,
                    "content": {kind: {} for kind in endpoint.media_types if kind != JSON},
                }
            },
            openapi_extra=declared_request(endpoint),
        )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            return EndpointResponse(self.declared)

        return handle


# Declaring a route takes a millisecond, and routes have no state: all apps of a process share them.
route_of = functools.cache(EndpointRoute)


class MethodNotAllowedError(ApiError):
    """A path has endpoints, but none for the method of the request."""

    def __init__(self, path: str, methods: Iterable[str]) -> None:
        self._methods = tuple(methods)
        super().__init__("method_not_allowed", f"{path} accepts only {' and '.join(self._methods)}.")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", ", ".join(self._methods).encode())]


class Application(FastAPI):
    """A FastAPI application of endpoints."""

    def __init__(self, endpoints: Sequence[Endpoint], error_formats: Mapping[str, ErrorFormat], **options: Any) -> None:
        """`error_formats` are the formats of paths without an endpoint, by prefix of the path."""
        super().__init__(
            routes=[route_of(endpoint) for endpoint in endpoints],
            openapi_url=None,  # service/http/docs.py serves it; FastAPI's own page loads scripts from the internet
            redirect_slashes=False,
            telemetry={"tracing": False, "metrics": False, "logs": False},
            **options,
        )
        self.table = RouteTable(endpoints, error_formats)
        codes: tuple[ErrorCode, ...] = ("not_found", "method_not_allowed")
        for code in codes:
            self.add_exception_handler(ERRORS[code].status, self._reject)

    async def _reject(self, request: Request, error: Exception) -> Response:
        """Raise the error of a request that no route accepts, which the dispatcher sends."""
        assert isinstance(error, HTTPException)
        call, path, route = request.scope[CALL], request.scope["path"], request.scope.get("route")
        if error.status_code == ERRORS["not_found"].status or route is None:
            raise self.table.not_found(call, path)
        if isinstance(route, EndpointRoute):
            call.error_format = route.declared.error_format
        by_method, _ = self.table.find(path)
        methods = tuple(by_method) or (error.headers or {})["Allow"].split(", ")
        raise MethodNotAllowedError(route.path, methods)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document.

        The errors of each endpoint are added here, because FastAPI drops the nulls from examples.
        """
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        routes = [route for route in self.routes if isinstance(route, EndpointRoute)]
        for route in routes:
            operation = document["paths"][route.path][route.declared.method.lower()]
            success = operation["responses"]["200"]
            operation["responses"] = {"200": success, **declared_errors(route.declared, route.unique_id)}
        schemas = document["components"]["schemas"] | schemas_of_errors(route.declared for route in routes)
        # FastAPI also declares schemas that no operation uses: its own errors, and fields that have
        # another schema in this document.
        used, remaining = set[str](), [document["paths"]]
        while remaining:
            names = set(re.findall(r"#/components/schemas/([\w.-]+)", str(remaining.pop()))) - used
            used |= names
            remaining += [schemas[name] for name in names]
        document["components"]["schemas"] = {name: schemas[name] for name in sorted(used)}
        return document
