"""Compatibility APIs: they map requests of other services' clients to the use cases.

The endpoints of a module are its `ENDPOINTS`, and the form of their errors is its `ERRORS`, or a
sentence without it. If an API has all paths with some prefix, it is the `PREFIX` of the module:
errors of unknown paths then have the form of the API.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType

from sightline.service.api.endpoint import Endpoint, ErrorFormat
from sightline.service.compat.common import SENTENCE_ERRORS
from sightline.service.settings import COMPATIBLE_APIS


def endpoints(names: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints of these APIs, tagged with the names of all APIs that have them."""
    return [
        replace(
            endpoint,
            error_format=_errors_of(module),
            tags=tuple(name for name in COMPATIBLE_APIS if module in _modules([name])),
        )
        for module in _modules(names)
        for endpoint in module.ENDPOINTS
    ]


def error_formats(names: Sequence[str]) -> dict[str, ErrorFormat]:
    """Return the error formats of paths without an endpoint, by prefix of the path."""
    return {module.PREFIX: _errors_of(module) for module in _modules(names) if hasattr(module, "PREFIX")}


def _errors_of(module: ModuleType) -> ErrorFormat:
    errors: ErrorFormat = getattr(module, "ERRORS", SENTENCE_ERRORS)
    return errors


def _modules(names: Sequence[str]) -> list[ModuleType]:
    """Return the modules of these APIs, each once."""
    modules = dict.fromkeys(module for name in names for module in COMPATIBLE_APIS[name])
    return [import_module(f"{__name__}.{module}") for module in modules]
