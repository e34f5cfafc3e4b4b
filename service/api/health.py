"""GET /health/live, /health/ready, /health and /metrics: for orchestrators and monitoring."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from service.api.endpoint import UNAVAILABLE_ERRORS, Endpoint, Raw
from service.inference.call import Call


@dataclass(frozen=True)
class Health:
    """The state of the process."""

    status: Literal["live", "ready", "ok"]


async def live(call: Call) -> Health:
    """Say that the process runs; restart it if this fails."""
    return Health("live")


async def ready(call: Call) -> Health:
    """Say whether requests are served; send none if this fails."""
    call.service.check_ready()
    return Health("ready")


async def health(call: Call) -> Health:
    """Say whether requests are served, as clients of other services ask for it."""
    call.service.check_ready()
    return Health("ok")


async def metrics(call: Call) -> Raw:
    """Return the metrics in the Prometheus text format."""
    parts = []
    for part in call.service.metrics.render_parts():
        parts.append(part)
        await asyncio.sleep(0)  # let other calls go on between two metrics
    return Raw(b"".join(parts), CONTENT_TYPE_PLAIN_0_0_4)


ENDPOINTS = (
    Endpoint("GET", "/health/live", live, Health),
    Endpoint("GET", "/health/ready", ready, Health, errors=UNAVAILABLE_ERRORS),
    Endpoint("GET", "/health", health, Health, errors=UNAVAILABLE_ERRORS),
    Endpoint("GET", "/metrics", metrics, media_types=("text/plain",)),
)
