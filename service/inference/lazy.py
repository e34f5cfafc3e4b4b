"""Models that are loaded on their first use (`lazy_models`).

The first call of such a model starts its load and waits for it, as do all calls that arrive
meanwhile. The bundle is loaded in a thread of its own, so that other models are served as usual.
"""

import asyncio
import contextlib
import math
import time

from sightline.service.api_errors import ApiError
from sightline.service.inference.changes import remove_engine
from sightline.service.inference.service import ListedModel, ServedModel, Service


async def load_on_first_use(service: Service, name: str, num_bytes: int, seconds_left: float) -> ServedModel:
    """Load a lazy model, or wait for its load in progress, which goes on if the call stops waiting.

    Fails with `loading` after `seconds_left`, with `internal` if the load fails or has failed
    within the last 30 seconds, with `overloaded` if too many calls wait for it, and with
    `model_not_found` if the model is unloaded meanwhile.
    """
    lazy = service.models[name]
    reservation = lazy.admission.reserve(1, num_bytes)
    try:
        if lazy.load is None:
            _check_retry(name, lazy)
            lazy.load = asyncio.create_task(_load(service, name, lazy))
        async with asyncio.timeout(seconds_left):
            await asyncio.shield(lazy.load)
    except TimeoutError:
        message = f"{name} is loaded on its first use, and its load has not finished in time. Retry later."
        raise ApiError("loading", message) from None
    finally:
        lazy.admission.release(reservation)
    listed = service.models.get(name)
    if listed is None or listed.loaded is None:
        _check_retry(name, lazy)
        raise ApiError("model_not_found", field="model")
    return listed.loaded.model


async def reload(service: Service, name: str) -> bool:
    """Load a model again that cannot run any more; return False if that is not possible.

    Its open calls fail with `loading`. From now on, calls wait for the load.
    """
    service.metrics.for_model(name).on_reload()
    async with service.model_locks[name]:
        if service.state_of(name) != "ready":  # it was unloaded meanwhile
            return True
        listed, controller = service.models[name], service.detach_model(name)
        service.list_lazy(listed.manifest, listed.max_rows)
        del listed  # it has the engine, whose memory must be free before the bundle is loaded again
        await remove_engine(service, name, controller, "loading")
    lazy = service.models[name]
    if lazy.load is None:
        lazy.load = asyncio.create_task(_load(service, name, lazy))
    await lazy.load
    return service.state_of(name) == "ready"


def _check_retry(name: str, lazy: ListedModel) -> None:
    """Reject a call too soon after a failed load."""
    seconds = 0.0 if lazy.retry_at is None else lazy.retry_at - time.monotonic()
    if seconds > 0:
        message = f"{name} failed to load; the log has the reason. Retry in {math.ceil(seconds)} s."
        raise ApiError("internal", message)


async def _load(service: Service, name: str, lazy: ListedModel) -> None:
    """Load a lazy model. A failure is recorded in `lazy`, from which each call makes its error."""
    try:
        with contextlib.suppress(ApiError):
            await service.peers.load(service, name, only_if_lazy=True)
    finally:
        lazy.load = None
