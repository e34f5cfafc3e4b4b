"""GET /health/live, /health/ready, /health, /ping, /metrics: for orchestrators and monitoring."""

from dataclasses import dataclass
from typing import Annotated, Literal

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field

from sightline.service.api.endpoint import UNAVAILABLE_ERRORS, Call, Endpoint, Raw
from sightline.service.api.types import FailedModels


@dataclass(frozen=True)
class Health:
    """The state of the process."""

    status: Annotated[Literal["live", "ok"], Field(description="State of the process.")]


@dataclass(frozen=True)
class Readiness:
    """The state of a process that serves requests."""

    status: Annotated[Literal["ready"], Field(description="State of the process.")]
    failed_models: FailedModels


async def live(call: Call) -> Health:
    """Return 200 if the process runs; restart it if this fails."""
    return Health("live")


async def ready(call: Call) -> Readiness:
    """Say that requests are served; send none if this fails."""
    call.service.check_ready()
    return Readiness("ready", call.service.failed_models)


async def health(call: Call) -> Health:
    """Return 200 if requests are served, on paths that other services and SageMaker have."""
    call.service.check_ready()
    return Health("ok")


async def metrics(call: Call) -> Raw:
    """Return the metrics in the Prometheus text format."""
    texts = await call.service.peers.call("metrics")
    return Raw("".join(texts).encode(), CONTENT_TYPE_PLAIN_0_0_4)


ENDPOINTS = (
    Endpoint("GET", "/health/live", live, Health, ignores_query=True, is_open=True),
    Endpoint("GET", "/health/ready", ready, Readiness, errors=UNAVAILABLE_ERRORS, ignores_query=True, is_open=True),
    Endpoint("GET", "/health", health, Health, errors=UNAVAILABLE_ERRORS, ignores_query=True, is_open=True),
    Endpoint("GET", "/ping", health, Health, errors=UNAVAILABLE_ERRORS, ignores_query=True, is_open=True, name="ping"),
    Endpoint("GET", "/metrics", metrics, media_types=("text/plain",), ignores_query=True, role="admin"),
)
