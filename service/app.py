"""The application: its endpoints, what serves them, and the loading of models while it starts."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import FastAPI

from service import __version__, compat
from service.api import attention, classify, encode, generate, health, models, score, similar, tokens
from service.bundle import BundleError
from service.http import docs
from service.http.dispatch import Dispatcher
from service.http.routing import DescribedApp, RouteTable
from service.inference.service import Backend, Service
from service.metrics import Metrics, ModelMetrics
from service.runtime.provider import RuntimeUnavailableError
from service.settings import Settings

# Makes the backend, away from the event loop; it gives the engines the observers that the callable makes.
Load = Callable[[Settings, Callable[[str], ModelMetrics]], Backend]
EXIT_CANNOT_SERVE = 3  # also uvicorn's where the port is taken; starting again will not help
EXIT_ENGINE_DEAD = 1
WATCH_INTERVAL_S = 1.0
NATIVE = (generate, score, attention, encode, classify, similar, tokens, models, health)

logger = logging.getLogger(__name__)


def create_app(settings: Settings, load: Load, end_process: Callable[[int], None] | None = None) -> DescribedApp:
    """Make the application, which begins to load when its lifespan starts.

    Args:
        settings: of this process.
        load: makes the models and their worker. It runs in a thread of its own and may take its time.
        end_process: called once with an exit code if the process has no more use: a bundle cannot be served, or the
            engine died.
    """
    service = Service(settings, Metrics(__version__))
    service.metrics.set_limits(settings.limits | {"max_response_bytes": service.response_memory.limit})

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(_load_and_watch(service, load, end_process or (lambda code: None)))
        try:
            yield
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await service.stop()

    table = RouteTable(compat.error_formats(settings.family_names))
    app = DescribedApp(
        table,
        title="Sightline",
        version=__version__,
        description="Serves trained attention models, and shows what they attend to.",
        lifespan=lifespan,
        openapi_url=None,  # service/http/docs.py has it, and a page; FastAPI's own loads its scripts from the internet
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for module in NATIVE:
        app.add_endpoints(module.ENDPOINTS)
    app.add_endpoints(docs.endpoints(app.openapi))
    app.add_endpoints(compat.endpoints(settings.family_names))
    app.serve_with(Dispatcher(service, table, app.router))
    app.state.service = service
    return app


async def _load_and_watch(service: Service, load: Load, end_process: Callable[[int], None]) -> None:
    """Load, serve, and end the process where it cannot go on."""
    observers: dict[str, ModelMetrics] = {}

    def observer_of(model: str) -> ModelMetrics:
        return observers.setdefault(model, service.metrics.of_model(model))

    try:
        backend = await asyncio.to_thread(load, service.settings, observer_of)
    except Exception as error:
        is_expected = isinstance(error, BundleError | RuntimeUnavailableError)
        logger.error("cannot serve: %s", error if is_expected else f"{type(error).__name__}: {error}")
        end_process(EXIT_CANNOT_SERVE)
        return
    backend.worker.start()
    service.attach(backend, observers)
    _log_ready(backend.models)
    worker = backend.worker
    # What takes longer than any request may has ended them all, and holds up whatever comes.
    while worker.is_alive and worker.step_seconds <= service.settings.request_timeout_s:
        await asyncio.sleep(WATCH_INTERVAL_S)
    if worker.has_died:
        logger.error("the engine's thread has ended; the process ends with it")
    elif worker.is_alive:
        logger.error("a step of the engine does not end; the process ends")
        worker.give_up()
    else:  # stopped, at the end of a drain
        return
    end_process(EXIT_ENGINE_DEAD)


def _log_ready(models: Mapping[str, Any]) -> None:
    for model in models.values():
        logger.info(
            "ready",
            extra={
                "fields": {
                    "model": model.name,
                    "provider": model.provider,
                    "threads": model.threads,
                    "max_rows": model.max_rows,
                }
            },
        )
