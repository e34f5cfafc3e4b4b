"""Changes of the served models while the service runs: load one, replace one, unload one.

They do not block the event loop: a bundle is loaded in a thread of its own, and the engine thread
only adds or removes an engine between two steps. A model has one state in each process:

| state    | in lists   | calls of the model                                               |
|----------|------------|------------------------------------------------------------------|
| absent   | no         | get `model_not_found`; those in progress have finished or failed |
| replaced | no         | get `loading`, while those in progress finish                    |
| unloaded | `unloaded` | start its load (`lazy_models`), see loading                      |
| loading  | `loading`  | wait for the load until their deadlines                          |
| failed   | `failed`   | get `internal` for 30 s; then the next one starts the load again |
| ready    | `ready`    | run                                                              |

Each event holds the lock of the model, except a first use, which starts one. "=" changes nothing:

| state    | first use | loaded   | load fails | unload | a step hangs, or others need the memory |
|----------|-----------|----------|------------|--------|-----------------------------------------|
| absent   |           | ready    | =          | =      | =                                       |
| unloaded | loading   | ready    | failed     | absent | =                                       |
| loading  | =         | ready    | failed     | absent | =                                       |
| failed   | loading   | ready    | =          | absent | =                                       |
| ready    |           | replaced | =          | absent | unloaded                                |
| replaced |           | ready    |            |        |                                         |

"Loaded" and "load fails" are the two ends of a load, which has two phases. First, every process
loads the bundle beside the old model, whose state stays. Then all of them serve it, or all drop it,
because one failed or read another version. If the bundle has not changed, it is only checked, and
the model stays ready. The load of a first use does nothing if the model is ready or absent when its
turn comes. A step that hangs is ended, and the load starts at once. A lazy model without calls is
unloaded before the load of another one for which the memory does not suffice. The start of the
process makes models ready or, if they are lazy, unloaded. Its end makes those that load unloaded or
failed.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Literal, TypeVar

from sightline.base.bundle import BundleError, Manifest
from sightline.base.machine import resident_bytes
from sightline.base.threads import INTERRUPTIONS, run_in_daemon_thread
from sightline.service.api_errors import ApiError
from sightline.service.engine.request import FailureCode
from sightline.service.inference.admission import AdmissionController
from sightline.service.inference.service import LoadedModel, Model, ServedModel, Service
from sightline.service.metrics import Metrics, texts_of
from sightline.service.peers import NoPeers
from sightline.service.quotas import QuotaStore
from sightline.service.settings import Settings

T = TypeVar("T")
POLL_S = 0.01
RETRY_DELAY_S = 30.0  # time after a failed load of a lazy model before a call starts the next one
logger = logging.getLogger(__name__)


def new_service(settings: Settings, metrics: Metrics) -> Service:
    """Return a service that is one process, and has no models yet."""
    handlers = QuotaStore(settings.quota_storage_url).handlers()
    service = Service(settings, metrics, NoPeers(handlers))

    async def load_here(name: str, only_if_lazy: bool) -> None:
        phases = load(service, name, only_if_lazy=only_if_lazy)
        await anext(phases)
        await finish(phases, is_agreed=True)

    handlers["metrics"] = lambda: texts_of(metrics.registry.collect())
    handlers["load"], handlers["unload"] = load_here, partial(unload, service)
    return service


async def load(service: Service, name: str, *, only_if_lazy: bool) -> AsyncGenerator[str | None, bool]:
    """Load a model in two phases; `finish` must follow the first one unless it fails.

    The first phase yields the digest of the bundle, also if it is served already, or None if
    nothing is to do. It fails with `model_not_found`, or with `internal` if the bundle cannot be
    loaded. `name` is that of the manifest; it is never used as a path. With `only_if_lazy`, only a
    model is loaded that waits for its first use.
    """
    model = service.model(name)
    # The memory of lazy models is reserved.
    async with contextlib.nullcontext() if only_if_lazy else service.repository_lock, model.lock:
        if only_if_lazy and not _is_lazy(model):
            yield None
            return
        try:
            digest, loaded = await _read(service, model)
        except ApiError:
            _delay_retry(model)
            raise
        is_agreed = yield digest
        if not is_agreed:
            _delay_retry(model)
        elif loaded is not None:
            try:
                if model.state == "ready":
                    await _unload(service, model, "replaced")
                await service.worker.add(name, loaded.engine)
                service.list_model(loaded.model.manifest, loaded.model.max_rows, loaded)
            finally:
                if model.state == "replaced":
                    model.state = "absent"


async def finish(phases: AsyncGenerator[str | None, bool], *, is_agreed: bool) -> None:
    """Run the second phase of `load`: serve the model, or drop it unless all could load it."""
    with contextlib.suppress(StopAsyncIteration):
        await phases.asend(is_agreed)


async def unload(service: Service, name: str) -> None:
    """Unload a model in this process; do nothing if its bundle is there, but not served."""
    model = service.model(name)
    async with model.lock:
        if model.state == "absent":
            await _find_bundle(service, name)
            return
        await _unload(service, model, "absent")
        logger.info("unloaded %s", name)


async def reload(service: Service, name: str) -> bool:
    """Load a model again that cannot run any more; return False if that is not possible.

    Its open calls fail with `loading`. From now on, calls wait for the load.
    """
    service.metrics.for_model(name).on_reload()
    model = service.model(name)
    async with model.lock:
        if model.state != "ready":  # it was unloaded meanwhile
            return True
        # The memory of the engine must be free before the bundle is loaded again.
        await _unload_until_used(service, model)
    await _start_load(service, model)
    return model.state not in ("unloaded", "failed")  # absent: it was unloaded meanwhile


async def load_on_first_use(service: Service, name: str, num_bytes: int, seconds_left: float) -> ServedModel:
    """Load a lazy model, or wait for its load in progress, which goes on if the call stops waiting.

    Fails with `loading` after `seconds_left`, with `internal` if the load fails or has failed
    within the last 30 seconds, with `overloaded` if too many calls wait for it, and with
    `model_not_found` if the model is unloaded meanwhile.
    """
    model = service.models[name]
    admission = model.admission
    reservation = admission.reserve(1, num_bytes)
    try:
        if model.load is None:
            _check_retry(model)
        async with asyncio.timeout(seconds_left):
            await asyncio.shield(_start_load(service, model))
    except TimeoutError:
        message = f"{name} is loaded on its first use, and its load has not finished in time. Retry later."
        raise ApiError("loading", message) from None
    finally:
        admission.release(reservation)
    if model.loaded is None:
        _check_retry(model)
        raise ApiError("model_not_found", field="model")
    return model.loaded.model


def _start_load(service: Service, model: Model) -> asyncio.Task[None]:
    """Return the load for which calls wait; each makes its error from what it finds after it."""

    async def run() -> None:
        try:
            with contextlib.suppress(ApiError):
                await service.peers.call("load", model.name, True)
        finally:
            model.load = None
            if model.state == "loading":
                model.state = "unloaded" if model.retry_at is None else "failed"

    if model.load is None:
        model.state, model.load = "loading", asyncio.create_task(run())
    return model.load


def _check_retry(model: Model) -> None:
    """Reject a call too soon after a failed load."""
    seconds = 0.0 if model.retry_at is None else model.retry_at - time.monotonic()
    if seconds > 0:
        message = f"{model.name} failed to load; the log has the reason. Retry in {math.ceil(seconds)} s."
        raise ApiError("internal", message)


def _delay_retry(model: Model) -> None:
    if _is_lazy(model):
        model.retry_at = time.monotonic() + RETRY_DELAY_S
        model.state = "failed" if model.load is None else "loading"


def _is_lazy(model: Model) -> bool:
    """Return True if the first use of the model loads it, or could once it may be tried again."""
    return model.state in ("unloaded", "loading", "failed")


async def _read(service: Service, model: Model) -> tuple[str, LoadedModel | None]:
    """Return the digest of a bundle, and the model unless the same version of it is ready."""
    name, repository = model.name, service.repository
    manifest = await _find_bundle(service, name)
    if model.state == "ready" and model.manifest == manifest:
        await _use_repository(name, partial(repository.check, name))
        return manifest.digest, None
    await _make_room(service, manifest.loaded_bytes)
    loaded = await _use_repository(name, partial(repository.load, name, service.reserved_bytes(name)))
    logger.info("loaded %s in %.2f s", name, loaded.model.load_seconds)
    return loaded.model.manifest.digest, loaded


async def _find_bundle(service: Service, name: str) -> Manifest:
    """Return the manifest of the bundle with this name, or raise `model_not_found`."""
    manifest = (await run_in_daemon_thread(service.repository.find)).get(name)
    if manifest is None:
        message = "No bundle in the bundles folder has this name; POST /v2/repository/index lists all."
        raise ApiError("model_not_found", message, field="model")
    return manifest


async def _use_repository(name: str, work: Callable[[], T]) -> T:
    """Read a bundle in a thread of its own. The log has the reason of a failure."""
    try:
        return await run_in_daemon_thread(work)
    except INTERRUPTIONS:
        raise
    except BaseException as error:
        is_expected = isinstance(error, BundleError)
        logger.error("%s is not loaded: %s", name, error, exc_info=None if is_expected else error)
        raise ApiError("internal", f"{name} failed to load; the log has the reason.") from None


async def _make_room(service: Service, num_bytes: int) -> None:
    """Unload lazy models without calls, the least recently used one first, until `num_bytes` more
    fit into the memory of the process.
    """
    most = 2 * service.settings.max_state_bytes - num_bytes
    idle = [model for model in service.models.values() if model.is_lazy and model.state == "ready"]
    for model in sorted(idle, key=lambda model: model.used_at):
        if resident_bytes() <= most:
            break
        if model.state == "ready" and not model.admission.num_calls and not model.lock.locked():
            async with model.lock:
                await _unload_until_used(service, model)
            logger.info("unloaded %s until its next use, because another model needs the memory", model.name)


async def _unload_until_used(service: Service, model: Model) -> None:
    """Unload a model; its next call loads it. Its open calls fail with `loading`."""
    admission = model.admission
    service.list_model(model.manifest, model.max_rows)
    await _remove_engine(service, model.name, admission, "loading")


async def _unload(service: Service, model: Model, state: Literal["absent", "replaced"]) -> None:
    """Reject new calls of a model, wait for those in progress, and release its engine, if any."""
    is_loaded = model.state == "ready"
    service.unlist_model(model, state)
    if is_loaded:
        deadline = time.monotonic() + service.settings.shutdown_timeout_s
        while model.admission.num_calls and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        await _remove_engine(service, model.name, model.admission, "model_not_found")


async def _remove_engine(service: Service, name: str, admission: AdmissionController, code: FailureCode) -> None:
    """Fail the calls that an engine still has with `code`, and release it."""
    admission.close_code = code
    service.worker.fail_requests(name, code)
    await service.worker.remove(name)
    # The engine, its sessions and its states are freed here, because this was the last reference.
    await service.worker.release_memory()
