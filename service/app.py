"""The application: its endpoints, its middleware, and the loading of models while it starts."""

import asyncio
import contextlib
import functools
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from sightline import __version__
from sightline.base.bundle import BundleError, Languages
from sightline.base.errors import EXIT_CANNOT_SERVE, EXIT_FAILED
from sightline.base.machine import resident_bytes
from sightline.base.threads import INTERRUPTIONS, run_in_daemon_thread
from sightline.service import compat
from sightline.service.api import glossaries, health, models, root
from sightline.service.api.endpoint import Endpoint
from sightline.service.http import docs, page
from sightline.service.http.application import Application
from sightline.service.http.dispatch import CallLog, ErrorSender
from sightline.service.inference.changes import new_service, reload
from sightline.service.inference.service import Backend, ServedModel, Service
from sightline.service.keys import KeyRing
from sightline.service.metrics import Metrics, ModelMetrics
from sightline.service.runtime.runner import RuntimeUnavailableError
from sightline.service.settings import Settings
from sightline.service.tasks import (
    align,
    answer,
    attention,
    classify,
    encode,
    fill_mask,
    generate,
    rerank,
    score,
    tag,
    tokens,
    translate,
)

# Loads the models. Takes the settings and a function that returns the observer of a model's engine.
Load = Callable[[Settings, Callable[[str], ModelMetrics]], Backend]
END_STEP_TIMEOUT_S = 0.5  # time that a graph may take to end after its termination: that of one operator
WATCH_INTERVAL_S = 1.0
OBJECTS_PER_COLLECTION = 50_000  # new ones between two searches for garbage, of which calls leave none
NATIVE = (
    generate,
    score,
    attention,
    align,
    translate,
    encode,
    classify,
    rerank,
    tag,
    answer,
    fill_mask,
    tokens,
    glossaries,
    models,
    health,
)

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    load: Load,
    end_process: Callable[[int], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> FastAPI:
    """Create the application, whose lifespan starts to load the models in a thread of its own.

    `end_process` is called once with an exit code if the process cannot serve: no model can be
    loaded, or the engine has died. `on_ready` is called when the models are loaded.
    """
    service = new_service(settings, Metrics(__version__, settings.request_timeout_s))
    service.metrics.set_limits(settings.limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = [asyncio.create_task(_load_and_watch(service, load, end_process, on_ready))]
        if service.keys is not None:
            running.append(asyncio.create_task(_follow(service.keys)))
        try:
            yield
        finally:
            for task in running:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await service.stop()

    app = Application(
        endpoints_of(settings),
        compat.error_formats(settings.api_names),
        title="Sightline",
        version=__version__,
        description="Serves trained attention models, and shows what they attend to.",
        lifespan=lifespan,
    )
    # The last middleware that is added is the outermost.
    app.add_middleware(ErrorSender, service=service)
    if settings.allowed_origins:
        app.add_middleware(
            Cors,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # client libraries in pages send their own, such as x-stainless-lang
            expose_headers=["Retry-After", "X-Request-Id", "X-Sightline-Repaired", "X-Sightline-Warning"],
        )
    app.add_middleware(CallLog, service=service)
    app.state.service = service
    app.state.made = {}
    return app


def endpoints_of(settings: Settings) -> list[Endpoint]:
    """Return the endpoints of the application, in the order of the document."""
    return [
        *(page.endpoints(settings.allowed_frames) if settings.page else root.ENDPOINTS),
        *(endpoint for module in NATIVE for endpoint in module.ENDPOINTS),
        *docs.ENDPOINTS,
        *compat.endpoints(settings.api_names),
    ]


class Cors(CORSMiddleware):
    """Middleware for pages of other origins, which names the setting if it rejects one."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            response.body = bytes(response.body) + b": SIGHTLINE_CORS_ORIGINS has the origins that the service allows"
            response.headers["content-length"] = str(len(response.body))
        return response


async def _load_and_watch(
    service: Service, load: Load, end_process: Callable[[int], None] | None, on_ready: Callable[[], None] | None
) -> None:
    """Load the models, serve them, and end the process if it can no longer serve."""
    end_process = end_process or (lambda code: None)
    try:
        backend = await run_in_daemon_thread(functools.partial(load, service.settings, service.metrics.for_model))
    except INTERRUPTIONS:
        raise
    except BaseException as error:
        is_expected = isinstance(error, BundleError | RuntimeUnavailableError)
        logger.error("cannot serve: %s", error if is_expected else f"{type(error).__name__}: {error}")
        end_process(EXIT_CANNOT_SERVE)
        return
    worker = backend.worker
    worker.start()
    service.attach(backend)
    del backend  # a model that is unloaded must have no other reference
    # The loaded objects stay until the end. Without this the garbage collector would walk all of
    # them, for some ten milliseconds, in the middle of a request.
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    log_ready(service)
    if on_ready is not None:
        on_ready()
    # A step longer than the request timeout has outlived every request, and delays all new ones.
    # A pause of the whole process, as of a virtual machine, counts as at most two intervals.
    started, checked, seconds = worker.step_started, time.monotonic(), 0.0
    while worker.is_alive:
        await asyncio.sleep(WATCH_INTERVAL_S)
        if worker.step_started != started:
            started, seconds = worker.step_started, 0.0
            checked = started or checked
        now = time.monotonic()
        seconds, checked = seconds + min(now - checked, 2 * WATCH_INTERVAL_S), now
        is_late = started is not None and seconds > service.settings.request_timeout_s
        if is_late and not await _end_step(service):
            break
    if worker.has_died:
        logger.error("the engine's thread has ended; the process ends with it")
    elif not worker.is_alive:  # stopped, at the end of a drain
        return
    end_process(EXIT_FAILED)


async def _end_step(service: Service) -> bool:
    """End a step that hangs, and load its model again; return False if the process must end."""
    name = await service.worker.end_step(END_STEP_TIMEOUT_S)
    if name is None:
        logger.error("a step of the engine does not end; the process ends")
        service.worker.abandon_thread()
        return False
    logger.error("a step of %s did not end by itself; the model is loaded again", name)
    if await reload(service, name):
        return True
    logger.error("%s cannot be loaded again; the process ends", name)
    return False


async def _follow(keys: KeyRing) -> None:
    """Read the keys again when their file changes."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        await run_in_daemon_thread(keys.reload)


def log_ready(service: Service) -> None:
    """Log a line for each model, then one for the process."""
    loaded = {name: listed.loaded.model for name, listed in service.models.items() if listed.loaded is not None}
    lazy = [name for name in service.models if name not in loaded]
    width = max(map(len, loaded), default=0)
    for model in loaded.values():
        names = ("provider", "threads", "threads_alone", "max_rows")
        fields = {"model": model.name, **{name: getattr(model, name) for name in names}}
        logger.info("ready", extra={"fields": fields, "text": _ready_text(model, width)})
    settings, resident = service.settings, resident_bytes()
    failed = f"; {len(service.failed_models)} failed to load" if service.failed_models else ""
    on_use = f"; {len(lazy)} more {'is' if len(lazy) == 1 else 'are'} loaded on first use" if lazy else ""
    on_prefixes = ""
    if any(manifest.has_prefix_states for manifest in service.manifests):
        on_prefixes = f", {size_text(settings.max_prefix_cache_bytes)} for prefixes of prompts"
    text = (
        f"serving {len(loaded)} {'model' if len(loaded) == 1 else 'models'}{on_use}{failed}; "
        f"default: {service.default_model or 'none'}; "
        f"memory: {size_text(resident)} now, up to {size_text(settings.max_state_bytes)} more for decoder "
        f"state{on_prefixes} and {size_text(settings.max_response_bytes)} for responses"
    )
    summary = {
        "models": list(loaded),
        "lazy_models": lazy,
        "failed_models": service.failed_models,
        "default_model": service.default_model,
        "resident_bytes": resident,
        "max_state_bytes": settings.max_state_bytes,
        "max_prefix_cache_bytes": settings.max_prefix_cache_bytes,
        "max_response_bytes": settings.max_response_bytes,
    }
    logger.info("serving", extra={"fields": summary, "text": text})


def _ready_text(model: ServedModel, width: int) -> str:
    manifest = model.manifest
    languages = f"{_languages_text(manifest.languages)}, " if manifest.languages else ""
    threads = ", ".join(f"{graph} {count}" for graph, count in model.threads.items()) or "default"
    if model.threads_alone > 1:
        threads += f", while other workers are idle {model.threads_alone}"
    return (
        f"ready: {model.name:{width}}  {languages}{manifest.dtype} on {model.provider}, "
        f"{model.max_rows} rows, threads: {threads}"
    )


def _languages_text(languages: Languages) -> str:
    if len(languages.sources) == len(languages.targets) == 1:
        return f"{languages.source} to {languages.target}"
    return f"{len(languages.sources)} to {len(languages.targets)} languages"


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
