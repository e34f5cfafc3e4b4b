"""Use cases of the model repository: list the bundles of the folder, load one, unload one.

The bundles folder is the repository. A model is chosen by the name in its manifest; a request can
give no path, URL or configuration. Changes run one after another. They do not block the event loop:
a bundle is loaded in a thread of its own, and the engine thread only adds or removes an engine
between two steps.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal

from service.bundle import Manifest
from service.errors import ApiError
from service.inference.admission import AdmissionController
from service.inference.call import Call
from service.inference.lazy import attach_loaded, load_from_repository
from service.inference.service import Service
from service.threads import run_in_daemon_thread

POLL_S = 0.01
# Reasons in the index, by the state of the model.
REASONS = {"loading": "loading", "unloaded": "unloaded", "failed": "failed to load; the log has the reason"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RepositoryEntry:
    """A model of the repository and its state."""

    name: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str  # empty for a model that is ready


async def list_repository(call: Call, *, only_ready: bool) -> list[RepositoryEntry]:
    """List the models by name: loaded models, lazy models, and the other bundles of the folder.

    The other bundles are listed only if `model_control` allows to load them.

    Raises:
        ApiError: `loading`.
    """
    service = call.service
    names = {manifest.name for manifest in call.service.all_manifests()}
    if not only_ready and service.settings.model_control == "explicit":
        names |= (await run_in_daemon_thread(service.repository.find)).keys()
    entries = [_entry(service, name) for name in sorted(names)]
    return [entry for entry in entries if entry.state == "READY" or not only_ready]


def _entry(service: Service, name: str) -> RepositoryEntry:
    state = service.state_of(name)
    if state == "ready":
        return RepositoryEntry(name, "READY", "")
    return RepositoryEntry(name, "LOADING" if state == "loading" else "UNAVAILABLE", REASONS[state])


async def load_model(call: Call, name: str) -> RepositoryEntry:
    """Load a model of the bundles folder, or replace a loaded model whose bundle has changed.

    The bundle is loaded completely before the old model is unloaded: if the load fails, the old
    model stays. While the running calls of the old model finish, new calls get `loading`.

    Raises:
        ApiError: `forbidden`; `model_not_found`; `internal` if the bundle cannot be loaded.
    """
    service = call.service
    _check_allowed(service)
    async with service.repository_lock, service.model_locks[name]:
        manifest = await _find(service, name)
        is_loaded = service.state_of(name) == "ready"
        if is_loaded and service.models[name].manifest == manifest:
            return RepositoryEntry(name, "READY", "")
        loaded = await load_from_repository(service, name)
        if is_loaded:
            service.replaced_models.add(name)
        try:
            if is_loaded:
                await _unload(service, name)
            await attach_loaded(service, loaded)
        finally:
            service.replaced_models.discard(name)
        return RepositoryEntry(name, "READY", "")


async def unload_model(call: Call, name: str) -> RepositoryEntry:
    """Unload a model. Does nothing if the model is not loaded.

    New calls get `model_not_found` at once. Running calls may finish within `shutdown_timeout_s`. A
    model of `lazy_models` is no longer loaded by calls that use it.

    Raises:
        ApiError: `forbidden`; `model_not_found` if the bundles folder has no such model either.
    """
    service = call.service
    _check_allowed(service)
    async with service.model_locks[name]:
        if service.state_of(name) == "ready":
            await _unload(service, name)
        elif name in service.models:
            service.detach_model(name)
        else:
            await _find(service, name)
            return RepositoryEntry(name, "UNAVAILABLE", "unloaded")
        logger.info("unloaded %s", name)
        return RepositoryEntry(name, "UNAVAILABLE", "unloaded")


def _check_allowed(service: Service) -> None:
    if service.settings.model_control != "explicit":
        message = (
            "Models are loaded only when the service starts; set SIGHTLINE_MODEL_CONTROL=explicit to load and unload "
            "them by request."
        )
        raise ApiError("forbidden", message)


async def _find(service: Service, name: str) -> Manifest:
    """Return the manifest of the bundle with this name. The name is never used as a path.

    Raises:
        ApiError: `model_not_found`.
    """
    manifest = (await run_in_daemon_thread(service.repository.find)).get(name)
    if manifest is None:
        message = "No bundle in the bundles folder has this name; POST /v2/repository/index lists all."
        raise ApiError("model_not_found", message, field="model")
    return manifest


async def _unload(service: Service, name: str) -> None:
    controller = service.detach_model(name)
    await _wait_until_idle(controller, service.settings.shutdown_timeout_s)
    controller.is_closed = True
    service.worker.fail_requests(name, "model_not_found")
    await service.worker.remove(name)
    # The engine, its sessions and its states are freed here, because this was the last reference.
    await service.worker.release_memory()


async def _wait_until_idle(controller: AdmissionController, timeout_s: float) -> None:
    """Wait until the calls that are in progress have ended."""
    deadline = time.monotonic() + timeout_s
    while controller.num_calls and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
