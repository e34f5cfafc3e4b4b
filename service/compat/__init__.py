"""Compatibility APIs: they map requests of other services' clients to the use cases."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from service.api.endpoint import Endpoint, ErrorFormat
from service.compat import huggingface, libretranslate, open_inference, openai, tei, tgi
from service.compat.common import SENTENCE_ERRORS

APIS: Mapping[str, Sequence[Endpoint]] = MappingProxyType(
    {
        "openai": openai.ENDPOINTS,
        "open-inference": open_inference.ENDPOINTS,
        "tgi": (*tgi.ENDPOINTS, *huggingface.ENDPOINTS),
        "tei": (*tei.ENDPOINTS, *huggingface.ENDPOINTS),
        "libretranslate": libretranslate.ENDPOINTS,
    }
)
"""The endpoints of each API; those that two APIs share are in both."""


def endpoints(names: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints of these APIs, each once."""
    return list(dict.fromkeys(endpoint for name in names for endpoint in APIS[name]))


def error_formats(names: Sequence[str]) -> dict[str, ErrorFormat]:
    """Return the error formats of paths without an endpoint, by prefix of the path."""
    return {"/v2/": SENTENCE_ERRORS} if "open-inference" in names else {}
