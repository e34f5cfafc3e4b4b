"""Compatibility APIs: they map requests of other services' clients to the use cases."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from service.api.endpoint import Endpoint, ErrorFormat
from service.compat import huggingface, libretranslate, ollama, open_inference, openai, tei, tgi
from service.compat.common import SENTENCE_ERRORS

APIS: Mapping[str, Sequence[Endpoint]] = MappingProxyType(
    {
        "openai": openai.ENDPOINTS,
        "open-inference": open_inference.ENDPOINTS,
        "tgi": (*tgi.ENDPOINTS, *huggingface.ENDPOINTS),
        "tei": (*tei.ENDPOINTS, *huggingface.ENDPOINTS),
        "libretranslate": libretranslate.ENDPOINTS,
        "ollama": ollama.ENDPOINTS,
    }
)
"""The endpoints of each API; those that two APIs share are in both."""


def endpoints(names: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints of these APIs, each once."""
    return list(dict.fromkeys(endpoint for name in names for endpoint in APIS[name]))


def error_formats(names: Sequence[str]) -> dict[str, ErrorFormat]:
    """Return the error formats of paths without an endpoint, by prefix of the path."""
    prefixes = {"open-inference": "/v2/", "ollama": "/api/"}
    return {prefix: SENTENCE_ERRORS for name, prefix in prefixes.items() if name in names}
