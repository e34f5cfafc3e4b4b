"""GET /: the name of the service, links to its documentation, and its models."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service import __version__
from service.api.endpoint import JSON, Endpoint, Raw, to_json
from service.api.models import STATES, tasks_of
from service.bundle import Manifest
from service.inference.call import Call
from service.inference.service import ModelState, Service

HTML = "text/html"
HEADERS = {"vary": "Accept"}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "td{padding-right:1rem}:root{color-scheme:light dark}"
)


@dataclass(frozen=True)
class ModelSummary:
    """A served model."""

    id: Annotated[str, Field(description="Name of the model in requests.")]
    description: Annotated[str, Field(description="Description of the model.")]
    tasks: Annotated[list[str], Field(description="Tasks that the model can do, named after the routes.")]
    state: Annotated[ModelState, Field(description=STATES)]


@dataclass(frozen=True)
class Root:
    """The service, its documentation and its models."""

    name: Annotated[Literal["Sightline"], Field(description="Name of the service.")]
    version: Annotated[str, Field(description="Version of the service.")]
    status: Annotated[
        Literal["ready", "loading", "draining", "engine_dead"],
        Field(description="State of the process; requests are served if it is `ready`."),
    ]
    docs: Annotated[str, Field(description="Path of the documentation page.")]
    openapi: Annotated[str, Field(description="Path of the OpenAPI document.")]
    default_model: Annotated[
        str | None,
        Field(
            description="Model of requests that name none, if `default_models` has none for the task; null while the "
            "models load."
        ),
    ]
    default_models: Annotated[
        dict[str, str], Field(description="Model of requests that name none, by task; empty while the models load.")
    ]
    models: Annotated[list[ModelSummary], Field(description="Served models; empty while they load.")]
    failed_models: Annotated[
        list[str], Field(description="Folders of the bundles that failed to load; the log has the reasons.")
    ]


async def show_root(call: Call, headers: Mapping[bytes, bytes]) -> Raw:
    """Show the name of the service, its version, its documentation and its models.

    Clients that accept `text/html`, as browsers do, get a page.
    """
    root = root_of(call.service)
    if prefers_html(headers.get(b"accept", b"").decode("latin-1")):
        return Raw(render(root).encode(), f"{HTML}; charset=utf-8", 200, HEADERS)
    return Raw(to_json(root), JSON, 200, HEADERS)


def root_of(service: Service) -> Root:
    return Root(
        name="Sightline",
        version=__version__,
        status=service.unavailable_code or "ready",  # type: ignore[arg-type] # the other codes are not of the process
        docs="/docs",
        openapi="/openapi.json",
        default_model=service.default_model or None,
        default_models=dict(sorted(service.default_models.items())),
        models=[summary_of(manifest, service.state_of(name)) for name, manifest in service.manifests.items()],
        failed_models=service.failed_models,
    )


def summary_of(manifest: Manifest, state: ModelState) -> ModelSummary:
    return ModelSummary(manifest.name, manifest.description, tasks_of(manifest), state)


def prefers_html(accept: str) -> bool:
    """Return True if an Accept header names HTML and prefers it to JSON, or both equally."""
    weights: dict[str, float] = {}
    for media_range in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in media_range.split(";"))
        weights[kind] = next((_weight(one[2:]) for one in parameters if one.startswith("q=")), 1.0)
    return weights.get(HTML, 0.0) > 0 and weights[HTML] >= weights.get(JSON, 0.0)


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def render(root: Root) -> str:
    """Return the page, with relative links that also work behind a proxy that adds a prefix."""
    rows = "".join(
        f"<tr><td>{html.escape(model.id)}<td>{html.escape(', '.join(model.tasks))}<td>{html.escape(model.description)}"
        f"<td>{model.state}"
        for model in root.models
    )
    models = f"<table>{rows}</table>" if rows else f"<p>No models are served: {root.status}.</p>"
    failed = f"<p>Failed to load: {html.escape(', '.join(root.failed_models))}.</p>" if root.failed_models else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{root.name}</title><style>{STYLE}</style>'
        f"<h1>{root.name} {html.escape(root.version)}</h1><p>Serves trained attention models over HTTP. "
        f'<a href="docs">Documentation</a> · <a href="openapi.json">OpenAPI document</a></p>'
        f"<h2>Models</h2>{models}{failed}</html>"
    )


ENDPOINTS = (Endpoint("GET", "/", show_root, Root, media_types=(JSON, HTML)),)
