"""Table that finds the endpoint of a request."""

import difflib
import re
from collections.abc import Iterable, Mapping

from starlette.routing import compile_path

from sightline.service.api.endpoint import NATIVE_ERRORS, Endpoint, ErrorFormat
from sightline.service.api_errors import ApiError
from sightline.service.http.http_call import HttpCall

MAX_SUGGESTED_PATH = 128  # characters; longer paths are not compared with the routes


class RouteTable:
    """Finds the endpoint of a request by its method and path, without a search for most paths."""

    def __init__(self, endpoints: Iterable[Endpoint], error_formats: Mapping[str, ErrorFormat]) -> None:
        """`error_formats` are the formats of paths without an endpoint, by prefix of the path."""
        self._error_formats = error_formats
        self.by_path: dict[str, dict[str, Endpoint]] = {}  # paths without parameters, by method
        self._by_pattern: dict[re.Pattern[str], dict[str, Endpoint]] = {}
        for endpoint in endpoints:
            if "{" in endpoint.path:
                by_method = self._by_pattern.setdefault(compile_path(endpoint.path)[0], {})
            else:
                by_method = self.by_path.setdefault(endpoint.path, {})
            by_method[endpoint.method] = endpoint

    def find(self, path: str) -> tuple[Mapping[str, Endpoint], Mapping[str, str]]:
        """Return the endpoints of a path by method, and its parameters; empty if none matches.

        If a path matches two patterns, the first one is used.
        """
        if path in self.by_path:
            return self.by_path[path], {}
        for pattern, by_method in self._by_pattern.items():
            match = pattern.match(path)
            if match:
                return by_method, match.groupdict()
        return {}, {}

    def format_of(self, path: str) -> ErrorFormat:
        """Return the format of errors of a path without an endpoint."""
        formats = (error_format for prefix, error_format in self._error_formats.items() if path.startswith(prefix))
        return next(formats, NATIVE_ERRORS)

    def not_found(self, call: HttpCall, path: str) -> ApiError:
        """Return the error of a path without an endpoint; it names the nearest path, if any."""
        call.error_format = self.format_of(path)
        return ApiError("not_found", self._not_found_message(path))

    def _not_found_message(self, path: str) -> str:
        nearest = [f"/v1{path}"] if f"/v1{path}" in self.by_path else []
        if not nearest and len(path) <= MAX_SUGGESTED_PATH:
            nearest = difflib.get_close_matches(path, self.by_path, n=1, cutoff=0.75)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        return f"There is no such route.{hint} GET /docs lists all routes."
