"""Changes of the served models while the service runs: load one, replace one, unload one.

They do not block the event loop: a bundle is loaded in a thread of its own, and the engine thread
only adds or removes an engine between two steps.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sightline.base.bundle import BundleError, Manifest
from sightline.base.interruptions import INTERRUPTIONS
from sightline.base.threads import run_in_daemon_thread
from sightline.service.api_errors import ApiError
from sightline.service.engine.request import FailureCode
from sightline.service.inference.admission import AdmissionController
from sightline.service.inference.service import LoadedModel, Service
from sightline.service.metrics import Texts, texts_of

T = TypeVar("T")
POLL_S = 0.01
RETRY_DELAY_S = 30.0  # time after a failed load of a lazy model before a call starts the next one
logger = logging.getLogger(__name__)


class NoPeers:
    """`Peers` of a service that is one process."""

    async def metrics(self, service: Service) -> Texts:
        return await texts_of(service.metrics.collect())

    async def load(self, service: Service, name: str, *, only_if_lazy: bool) -> None:
        load = ModelLoad(service, name, only_if_lazy=only_if_lazy)
        await load.prepare()
        await load.finish(is_agreed=True)

    async def unload(self, service: Service, name: str) -> None:
        await unload_here(service, name)


class ModelLoad:
    """The load of one model in two phases, so that all processes of the service serve it or none.

    The bundle is loaded completely before an old model of the same name is unloaded. Other changes
    of the model wait from the first phase to the end of the second.
    """

    def __init__(self, service: Service, name: str, *, only_if_lazy: bool) -> None:
        """Create the load of the model with this name in its manifest; it is never used as a path.

        With `only_if_lazy`, it does nothing if the model is not waiting for its first use, because
        a request has loaded or unloaded it.
        """
        self._service = service
        self._name = name
        self._only_if_lazy = only_if_lazy
        self._loaded: LoadedModel | None = None  # None if nothing changes
        self._locks = contextlib.AsyncExitStack()

    async def prepare(self) -> str | None:
        """Load the bundle. `finish` must follow unless this fails.

        Return the digest of the bundle, also if it is served already; None if nothing is to do.
        Fails with `model_not_found`, or with `internal` if the bundle cannot be loaded.
        """
        service, name = self._service, self._name
        try:
            if not self._only_if_lazy:  # the memory of lazy models is reserved
                await self._locks.enter_async_context(service.repository_lock)
            await self._locks.enter_async_context(service.model_locks[name])
            if self._only_if_lazy and not self._is_waiting_for_use():
                return None
            manifest = await find_bundle(service, name)
            if service.state_of(name) != "ready" or service.models[name].manifest != manifest:
                self._loaded = await _load_from_repository(service, name)
                manifest = self._loaded.model.manifest
            else:
                await _use_repository(name, partial(service.repository.check, name))
        except BaseException as error:
            if isinstance(error, ApiError):
                self._delay_retry()
            await self._locks.aclose()
            raise
        return manifest.digest

    async def finish(self, *, is_agreed: bool) -> None:
        """Serve the loaded model, or drop it if another process could not load it.

        While the running calls of an old model finish, new calls get `loading`.
        """
        service, name, loaded = self._service, self._name, self._loaded
        async with self._locks:
            if not is_agreed:
                self._delay_retry()
                return
            if loaded is None:
                return
            try:
                if service.state_of(name) == "ready":
                    service.replaced_models.add(name)
                    await _unload(service, name)
                await service.worker.add(name, loaded.engine)
                service.attach_model(loaded)
            finally:
                service.replaced_models.discard(name)

    def _is_waiting_for_use(self) -> bool:
        """Return True if the model is listed and will be loaded on its first use."""
        return self._name in self._service.models and self._service.state_of(self._name) != "ready"

    def _delay_retry(self) -> None:
        if self._is_waiting_for_use():
            self._service.models[self._name].retry_at = time.monotonic() + RETRY_DELAY_S


async def unload_here(service: Service, name: str) -> None:
    """Unload a model in this process; do nothing if its bundle is there, but not loaded."""
    async with service.model_locks[name]:
        if service.state_of(name) == "ready":
            await _unload(service, name)
        elif name in service.models:
            service.detach_model(name)
        else:
            await find_bundle(service, name)
            return
        logger.info("unloaded %s", name)


async def find_bundle(service: Service, name: str) -> Manifest:
    """Return the manifest of the bundle with this name, or raise `model_not_found`."""
    manifest = (await run_in_daemon_thread(service.repository.find)).get(name)
    if manifest is None:
        message = "No bundle in the bundles folder has this name; POST /v2/repository/index lists all."
        raise ApiError("model_not_found", message, field="model")
    return manifest


async def _load_from_repository(service: Service, name: str) -> LoadedModel:
    loaded = await _use_repository(name, partial(service.repository.load, name, service.reserved_bytes(name)))
    logger.info("loaded %s in %.2f s", name, loaded.model.load_seconds)
    return loaded


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


async def _unload(service: Service, name: str) -> None:
    controller = service.detach_model(name)
    await _wait_until_idle(controller, service.settings.shutdown_timeout_s)
    await remove_engine(service, name, controller, "model_not_found")


async def remove_engine(service: Service, name: str, controller: AdmissionController, code: FailureCode) -> None:
    """Fail the open calls of a detached model with `code`, and release its engine."""
    controller.close_code = code
    service.worker.fail_requests(name, code)
    await service.worker.remove(name)
    # The engine, its sessions and its states are freed here, because this was the last reference.
    await service.worker.release_memory()


async def _wait_until_idle(controller: AdmissionController, timeout_s: float) -> None:
    """Wait until the calls that are in progress have ended."""
    deadline = time.monotonic() + timeout_s
    while controller.num_calls and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
