"""GET /: the name of the service, links to its documentation, and its models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sightline import __version__
from sightline.service.api.endpoint import Call, Endpoint
from sightline.service.api.models import STATES, tasks_of
from sightline.service.api.types import FailedModels
from sightline.service.inference.service import ModelState, Service


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
    failed_models: FailedModels


async def show_root(call: Call) -> Root:
    """Show the name of the service, its version, its documentation and its models."""
    return root_of(call.service)


def root_of(service: Service) -> Root:
    return Root(
        name="Sightline",
        version=__version__,
        status=service.unavailable_code or service.not_ready_code or "ready",  # type: ignore[arg-type] # the other codes are not of the process
        docs="/docs",
        openapi="/openapi.json",
        default_model=service.default_model or None,
        default_models=dict(sorted(service.default_models.items())),
        models=[
            ModelSummary(model.name, model.manifest.description, tasks_of(model.manifest), service.state_of(model.name))
            for model in service.models.values()
        ],
        failed_models=service.failed_models,
    )


ENDPOINTS = (Endpoint("GET", "/", show_root, Root, ignores_query=True),)
