"""Routes for clients of other services: one small file a family, each a translation to the service's own routes.

A family turns its body into the service's own, which is checked as ever, and the service's own answer into its own.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fastapi import FastAPI

from service.families import huggingface, libretranslate, open_inference, openai, tei, tgi

FAMILIES: Mapping[str, Sequence[Callable[[FastAPI], None]]] = MappingProxyType(
    {
        "openai": [openai.add_routes],
        "open-inference": [open_inference.add_routes],
        "tgi": [tgi.add_routes, huggingface.add_routes],
        "tei": [tei.add_routes, huggingface.add_routes],
        "libretranslate": [libretranslate.add_routes],
    }
)
"""What adds the routes of each family; what two families share stands in both."""


def add_families(app: FastAPI, names: Sequence[str]) -> None:
    """Add the routes of these families, each route once."""
    for add_routes in dict.fromkeys(adder for name in names for adder in FAMILIES[name]):
        add_routes(app)
