"""GET /health/live, /health/ready, /health and /metrics: for machines."""

import asyncio

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from service.answers import Health
from service.calls import Call, json_answer
from service.routing import UNAVAILABLE_ERRORS, add_route


async def live(call: Call) -> Response:
    """Say that the process runs; restart it where this fails."""
    return json_answer({"status": "live"})


async def ready(call: Call) -> Response:
    """Say whether requests are served; send none where this fails."""
    call.service.check_ready()
    return json_answer({"status": "ready"})


async def health(call: Call) -> Response:
    """Say whether requests are served, where other services' clients ask for it."""
    call.service.check_ready()
    return json_answer({"status": "ok"})


async def metrics(call: Call) -> Response:
    """Show the metrics in Prometheus' text format."""
    parts = []
    for part in call.service.metrics.render_parts():
        parts.append(part)
        await asyncio.sleep(0)  # let other calls go on between two metrics
    return Response(b"".join(parts), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def add_routes(app: FastAPI) -> None:
    add_route(app, "GET", "/health/live", live, Health)
    add_route(app, "GET", "/health/ready", ready, Health, errors=UNAVAILABLE_ERRORS)
    add_route(app, "GET", "/health", health, Health, errors=UNAVAILABLE_ERRORS)
    add_route(app, "GET", "/metrics", metrics, response_class=PlainTextResponse)
