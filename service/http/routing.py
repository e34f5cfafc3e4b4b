"""Endpoints as routes: a table that finds the endpoint of a request, and a FastAPI application that
describes them.

FastAPI declares each endpoint from its signature and writes the OpenAPI document. Requests are
dispatched by `service.http.dispatch`, because FastAPI's own handling costs more than the rest of a
call together and answers some bad bodies with 500 (see
docs/adr/0015-fastapi-describes-the-dispatcher-serves.md).
"""

import difflib
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp

from service.api.endpoint import BODY_ERRORS, COMMON_ERRORS, JSON, NATIVE_ERRORS, Endpoint, ErrorFormat
from service.http.openapi import RESPONSE_HEADERS, DeclaredErrors, declared_request, describe_path_parameters

# Arguments that a handler may take beside `call`, `body` and its path's parameters; see `Endpoint`.
FROM_REQUEST = ("model", "headers", "tail")


MAX_SUGGESTED_PATH = 128  # characters; longer paths are not compared with the routes


@dataclass(frozen=True)
class Route:
    """An endpoint with the arguments that its handler takes."""

    endpoint: Endpoint
    body_type: type[BaseModel] | None
    takes: frozenset[str]  # names among FROM_REQUEST


def route_of(endpoint: Endpoint) -> Route:
    parameters = inspect.signature(endpoint.handler).parameters
    body_type = parameters["body"].annotation if "body" in parameters else None
    return Route(endpoint, body_type, frozenset(FROM_REQUEST).intersection(parameters))


class RouteTable:
    """Finds the route of a request by its method and path."""

    def __init__(self, error_formats: Mapping[str, ErrorFormat]) -> None:
        """`error_formats` are the formats of paths without a route, by prefix of the path."""
        self._error_formats = error_formats
        self.by_path: dict[str, dict[str, Route]] = {}  # paths without parameters, by method
        self._by_pattern: dict[re.Pattern[str], dict[str, Route]] = {}

    def add(self, endpoint: Endpoint) -> Route:
        """Add an endpoint. If a path matches two endpoints, the first one is used."""
        route = route_of(endpoint)
        if "{" in endpoint.path:
            by_method = self._by_pattern.setdefault(compile_path(endpoint.path)[0], {})
        else:
            by_method = self.by_path.setdefault(endpoint.path, {})
        by_method[endpoint.method] = route
        return route

    def find(self, path: str) -> tuple[Mapping[str, Route], Mapping[str, str]]:
        """Return the routes with path parameters by method, and the parameters; empty if none
        matches.
        """
        for pattern, by_method in self._by_pattern.items():
            match = pattern.match(path)
            if match:
                return by_method, match.groupdict()
        return {}, {}

    def error_format(self, path: str) -> ErrorFormat:
        """Return the error format of a request without a route, by its path or a prefix of it."""
        for route in (self.by_path.get(path) or self.find(path)[0]).values():
            return route.endpoint.error_format
        formats = (one for prefix, one in self._error_formats.items() if path.startswith(prefix))
        return next(formats, NATIVE_ERRORS)

    def not_found_message(self, path: str) -> str:
        """Return the message for a path without a route, with the nearest route if there is one."""
        nearest = [f"/v1{path}"] if f"/v1{path}" in self.by_path else []
        if not nearest and len(path) <= MAX_SUGGESTED_PATH:
            nearest = difflib.get_close_matches(path, self.by_path, n=1, cutoff=0.75)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        return f"There is no such route.{hint} GET /docs lists all routes."


class DescribedApp(FastAPI):
    """A FastAPI application that describes endpoints; a dispatcher serves them."""

    def __init__(self, table: RouteTable, **options: Any) -> None:
        """`table` is the dispatcher's route table."""
        super().__init__(**options)
        self._table = table
        self._declared: list[tuple[Endpoint, DeclaredErrors]] = []

    def add_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Serve endpoints, and declare them for the OpenAPI document."""
        for endpoint in endpoints:
            self._declared.append((endpoint, self._declare(self._table.add(endpoint))))

    def serve_with(self, dispatcher: ASGIApp) -> None:
        """Use a dispatcher instead of FastAPI's routing to serve requests."""
        self._dispatcher = dispatcher

    def build_middleware_stack(self) -> ASGIApp:
        return self._dispatcher

    def _declare(self, route: Route) -> DeclaredErrors:
        endpoint = route.endpoint
        errors = (*endpoint.errors, *COMMON_ERRORS, *(BODY_ERRORS if route.body_type else ()))
        declared = DeclaredErrors(errors, endpoint.error_format)
        is_json = JSON in endpoint.media_types
        self.add_api_route(
            endpoint.path,
            _declaration(endpoint.handler),
            methods=[endpoint.method],
            response_model=endpoint.response,
            response_class=JSONResponse if is_json else Response,  # FastAPI declares errors in the media type of a 200
            responses={
                200: {
                    "headers": RESPONSE_HEADERS,
                    "content": {kind: {} for kind in endpoint.media_types if kind != JSON},
                },
                **declared.responses(),
            },
            summary=(endpoint.handler.__doc__ or "").split("\n")[0].rstrip("."),
            openapi_extra=declared_request(
                route.body_type, endpoint.body_format, model_in_query="model" in route.takes
            ),
        )
        return declared

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            paths = super().openapi()["paths"]
            for endpoint, declared in self._declared:
                operation = paths[endpoint.path][endpoint.method.lower()]
                describe_path_parameters(operation)
                responses = operation["responses"]
                declared.complete(responses)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _declaration(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a function with the part of a handler's signature that FastAPI describes."""

    async def declared(**_: Any) -> None:
        raise AssertionError("requests are dispatched, not routed")

    signature = inspect.signature(handler)
    shown = [one for name, one in signature.parameters.items() if name not in ("call", *FROM_REQUEST)]
    declared.__signature__ = signature.replace(parameters=shown, return_annotation=None)  # type: ignore[attr-defined]
    declared.__doc__, declared.__name__ = handler.__doc__, handler.__name__
    return declared
