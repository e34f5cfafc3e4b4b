"""Use cases of the model repository: list the bundles of the folder, load one, unload one.

The bundles folder is the repository. A model is chosen by the name in its manifest; a request can
give no path, URL or configuration.
"""

from dataclasses import dataclass
from typing import Literal

from sightline.base.threads import run_in_daemon_thread
from sightline.service.api_errors import ApiError
from sightline.service.inference.call import Call
from sightline.service.inference.service import Service

# Reasons in the index, by the state of the model.
REASONS = {"loading": "loading", "unloaded": "unloaded", "failed": "failed to load; the log has the reason"}


@dataclass(frozen=True)
class RepositoryEntry:
    """A model of the repository and its state."""

    name: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str  # empty for a model that is ready


async def list_repository(call: Call, *, only_ready: bool) -> list[RepositoryEntry]:
    """List the models by name: loaded models, lazy models, and the other bundles of the folder.

    The other bundles are listed only if `model_control` allows to load them.
    """
    service = call.service
    names = {manifest.name for manifest in service.require_manifests()}
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
    """
    _check_allowed(call.service)
    await call.service.peers.call("load", name, False)
    return RepositoryEntry(name, "READY", "")


async def unload_model(call: Call, name: str) -> RepositoryEntry:
    """Unload a model. Does nothing if the model is not loaded.

    New calls get `model_not_found` at once. Running calls may finish within `shutdown_timeout_s`. A
    model of `lazy_models` is no longer loaded by calls that use it.
    """
    _check_allowed(call.service)
    await call.service.peers.call("unload", name)
    return RepositoryEntry(name, "UNAVAILABLE", "unloaded")


def _check_allowed(service: Service) -> None:
    if service.settings.model_control != "explicit":
        message = (
            "Models are loaded only when the service starts; set SIGHTLINE_MODEL_CONTROL=explicit to load and unload "
            "them by request."
        )
        raise ApiError("forbidden", message)
