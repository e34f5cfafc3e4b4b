"""The FastAPI application: its routes, the errors of paths without a route, and its document."""

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.types import Scope

from sightline.service.api.endpoint import CALL, JSON, NATIVE_ERRORS, Endpoint, ErrorFormat
from sightline.service.api_errors import ERRORS, ApiError, ErrorCode
from sightline.service.body_fields import IdLists, Texts, UploadedFile
from sightline.service.http.dispatch import EndpointRoute
from sightline.service.http.http_call import HttpCall
from sightline.service.http.openapi import KEY_SCHEMES, schemas_of_errors, shared_errors

MAX_SUGGESTED_PATH = 128  # characters; longer paths are not compared with the routes
# The router compares a path with one route after another, so the paths of most calls come first.
FIRST_PATHS = (
    "/v1/generate",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/encode",
    "/v1/rerank",
    "/embed",
    "/generate",
    "/health/live",
    "/health/ready",
)

# Declaring a route takes a millisecond, so all apps of a process share them.
route_of = functools.cache(EndpointRoute)


def _place_of(route: EndpointRoute) -> tuple[bool, int]:
    """Return the key by which routes are sorted: a path of another route can fit a parameter."""
    return "{" in route.path, FIRST_PATHS.index(route.path) if route.path in FIRST_PATHS else len(FIRST_PATHS)


async def check_key(request: Request) -> None:
    """Check the key of a call to a route that is not an endpoint."""
    call: HttpCall = request.scope[CALL]
    call.check_access(call, None)


class Application(FastAPI):
    """A FastAPI application of endpoints."""

    def __init__(self, endpoints: Sequence[Endpoint], error_formats: Mapping[str, ErrorFormat], **options: Any) -> None:
        """`error_formats` are the formats of paths without an endpoint, by prefix of the path."""
        self._error_formats = error_formats
        self._documented = [route_of(endpoint) for endpoint in endpoints]  # in the order of the document
        super().__init__(
            routes=[*sorted(self._documented, key=_place_of)],
            dependencies=[Depends(check) for check in (check_key, *KEY_SCHEMES)],  # of routes that are added later
            openapi_url=None,  # service/http/docs.py serves it; FastAPI's own page loads scripts from the internet
            redirect_slashes=False,
            telemetry={"tracing": False, "metrics": False, "logs": False},
            **options,
        )
        codes: tuple[ErrorCode, ...] = ("not_found", "method_not_allowed")
        for code in codes:
            self.add_exception_handler(ERRORS[code].status, self._reject)

    async def _reject(self, request: Request, error: Exception) -> Response:
        """Raise the error of a request that no route accepts, which `ErrorSender` sends."""
        assert isinstance(error, HTTPException)
        call, path, route = request.scope[CALL], _path_in_app(request.scope), request.scope.get("route")
        formats = (form for prefix, form in self._error_formats.items() if path.startswith(prefix))
        call.error_format = next(formats, NATIVE_ERRORS)
        call.check_access(call, None)
        if error.status_code == ERRORS["not_found"].status or route is None:
            raise ApiError("not_found", self._not_found_message(path))
        methods = (error.headers or {})["Allow"].split(", ")
        if isinstance(route, EndpointRoute):
            path, call.error_format = route.path, route.declared.error_format
            methods = [other.declared.method for other in self._endpoint_routes if other.path == path]
        message = f"{path} accepts only {' and '.join(methods)}."
        if call.scope["method"] == "OPTIONS":
            message += " Pages of other origins may call it if SIGHTLINE_CORS_ORIGINS names them."
        raise ApiError("method_not_allowed", message, headers=[(b"allow", ", ".join(methods).encode())])

    @property
    def _endpoint_routes(self) -> list[EndpointRoute]:
        return [route for route in self.routes if isinstance(route, EndpointRoute)]

    def _not_found_message(self, path: str) -> str:
        """Return the message of a path without a route; it names the nearest path, if any."""
        paths = [route.path for route in self._endpoint_routes if "{" not in route.path]
        nearest = [f"/v1{path}"] if f"/v1{path}" in paths else []
        if not nearest and len(path) <= MAX_SUGGESTED_PATH:
            nearest = difflib.get_close_matches(path, paths, n=1, cutoff=0.75)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        return f"There is no such route.{hint} GET /docs lists all routes."

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document.

        The errors are added here, because FastAPI drops the nulls from examples.
        """
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = get_openapi(
            title=self.title,
            version=self.version,
            description=self.description,
            routes=[*self._documented, *(route for route in self.routes if route not in self._documented)],
        )
        # FastAPI also declares the types of fields that have another schema in this document.
        hidden = {Texts.__name__, IdLists.__name__, UploadedFile.__name__}
        for route in self._endpoint_routes:
            operation, declared = document["paths"][route.path][route.declared.method.lower()], route.declared
            del operation["responses"]["default"]
            if declared.body_type is not None and JSON not in declared.body_format.media_types:
                del operation["requestBody"]["content"][JSON]
                hidden.add(declared.body_type.__name__)
        endpoints, components = [route.declared for route in self._endpoint_routes], document["components"]
        schemas = components["schemas"] | schemas_of_errors(endpoints)
        components["schemas"] = {name: schemas[name] for name in sorted(schemas.keys() - hidden)}
        components["responses"] = shared_errors(endpoints)
        self.openapi_schema = document
        return document


def _path_in_app(scope: Scope) -> str:
    """Return the path of a request without the prefix of the application."""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return rest if rest[:1] in ("", "/") else path
