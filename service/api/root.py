"""GET /: the name of the service, links to its documentation, and its models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service import __version__
from service.api.endpoint import Endpoint
from service.api.models import tasks_of
from service.inference.call import Call
from service.inference.service import ServedModel, Service


@dataclass(frozen=True)
class ModelSummary:
    """A served model."""

    id: Annotated[str, Field(description="Name of the model in requests.")]
    description: Annotated[str, Field(description="Description of the model.")]
    tasks: Annotated[list[str], Field(description="Tasks that the model can do, named after the routes.")]


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
        str | None, Field(description="Model of requests that name none; null while the models load.")
    ]
    models: Annotated[list[ModelSummary], Field(description="Served models; empty while they load.")]
    failed_models: Annotated[
        list[str], Field(description="Folders of the bundles that failed to load; the log has the reasons.")
    ]


async def show_root(call: Call) -> Root:
    """Show the name of the service, its version, its documentation and its models."""
    return root_of(call.service)


def root_of(service: Service) -> Root:
    return Root(
        name="Sightline",
        version=__version__,
        status=service.unavailable_code or "ready",  # type: ignore[arg-type] # the other codes are not of the process
        docs="/docs",
        openapi="/openapi.json",
        default_model=service.default_model or None,
        models=[summary_of(model) for model in service.models.values()],
        failed_models=service.failed_models,
    )


def summary_of(model: ServedModel) -> ModelSummary:
    return ModelSummary(model.name, model.manifest.description, tasks_of(model.manifest))


ENDPOINTS = (Endpoint("GET", "/", show_root, Root),)
