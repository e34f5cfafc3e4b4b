"""The FastAPI application and its routes.

FastAPI's router can call the endpoints, and FastAPI describes them. The middleware of
`sightline.service.http.dispatch` calls them without that router.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sightline.service.api.endpoint import CALL, JSON, Endpoint, ErrorFormat
from sightline.service.api_errors import ERRORS, ApiError, ErrorCode
from sightline.service.http.dispatch import respond
from sightline.service.http.openapi import RESPONSE_HEADERS, declared_errors, declared_request, schemas_of_errors
from sightline.service.http.routing import RouteTable


class EndpointApp:
    """An endpoint as an ASGI application, which reads the body and writes the response."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.declared = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope[CALL], self.declared, scope["path_params"], send)


class EndpointRoute(Route):
    """The route of an endpoint. It is no `APIRoute`, because declaring one takes milliseconds."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.declared = endpoint
        super().__init__(endpoint.path, EndpointApp(endpoint), methods=[endpoint.method])


def summary_of(handler: Callable[..., Any]) -> str:
    """Return the first sentence of a handler's docstring, or its name if there is none (`-OO`)."""
    text = inspect.getdoc(handler) or f"{handler.__name__.replace('_', ' ').capitalize()}."
    return re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0].strip().rstrip(".")


@functools.cache
def described(endpoint: Endpoint) -> APIRoute:
    """Return an endpoint as FastAPI describes it."""
    return APIRoute(
        endpoint.path,
        endpoint.handler,
        methods=[endpoint.method],
        name=endpoint.name,
        summary=summary_of(endpoint.handler),
        description=inspect.getdoc(endpoint.handler) or summary_of(endpoint.handler),
        dependencies=[Depends(check) for check in endpoint.dependencies],
        response_model=endpoint.response,
        response_class=JSONResponse if JSON in endpoint.media_types else Response,
        responses={
            200: {"headers": RESPONSE_HEADERS, "content": {kind: {} for kind in endpoint.media_types if kind != JSON}}
        },
        openapi_extra=declared_request(endpoint),
    )


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
            routes=[EndpointRoute(endpoint) for endpoint in endpoints],
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
        scope, matched = request.scope, request.scope.get("endpoint")
        call, path = scope[CALL], get_route_path(scope)
        if error.status_code == ERRORS["not_found"].status or matched is None:
            raise self.table.not_found(call, path)
        by_method, _ = self.table.find(path)
        methods = tuple(by_method) or (error.headers or {})["Allow"].split(", ")
        if isinstance(matched, EndpointApp):
            path, call.error_format = matched.declared.path, matched.declared.error_format
        rejection = MethodNotAllowedError(path, methods)
        if request.method == "OPTIONS":
            rejection.text += " Pages of other origins may call it if SIGHTLINE_CORS_ORIGINS names them."
        raise rejection

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document.

        The errors of each endpoint are added here, because FastAPI drops the nulls from examples.
        """
        if self.openapi_schema is not None:
            return self.openapi_schema
        endpoints = [route.declared for route in self.routes if isinstance(route, EndpointRoute)]
        routes = list(map(described, endpoints))
        document = get_openapi(
            title=self.title, version=self.version, description=self.description, routes=[*routes, *self.routes]
        )
        for endpoint, route in zip(endpoints, routes, strict=True):
            operation = document["paths"][endpoint.path][endpoint.method.lower()]
            success = operation["responses"]["200"]
            operation["responses"] = {"200": success, **declared_errors(endpoint, route.unique_id)}
        schemas = document["components"]["schemas"] | schemas_of_errors(endpoints)
        # FastAPI also declares schemas that no operation uses: its own errors, and fields that have
        # another schema in this document.
        used, remaining = set[str](), [document["paths"]]
        while remaining:
            names = set(re.findall(r"#/components/schemas/([\w.-]+)", str(remaining.pop()))) - used
            used |= names
            remaining += [schemas[name] for name in names]
        document["components"]["schemas"] = {name: schemas[name] for name in sorted(used)}
        self.openapi_schema = document
        return document
