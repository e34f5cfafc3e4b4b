"""Models that are loaded on their first use (`lazy_models`).

The first call of such a model starts its load and waits for it, as do all calls that arrive
meanwhile. The bundle is loaded in a thread of its own, so that other models are served as usual.
"""

import asyncio
import logging
import math
import time
from functools import partial

from service.bundle import BundleError
from service.errors import INTERRUPTIONS, ApiError
from service.inference.service import ListedModel, LoadedModel, ServedModel, Service
from service.threads import run_in_daemon_thread

RETRY_DELAY_S = 30.0  # time after a failed load before a call starts the next one
logger = logging.getLogger(__name__)


async def load_on_first_use(service: Service, name: str, num_bytes: int, seconds_left: float) -> ServedModel:
    """Load a lazy model, or wait for its load in progress.

    The load continues if the call stops waiting.

    Args:
        service: the service; `name` is one of its lazy models.
        name: name of the model.
        num_bytes: size of the call's request body in bytes.
        seconds_left: maximum time to wait.

    Raises:
        ApiError: `loading` if the load takes longer than `seconds_left`; `internal` if it fails, or
            has failed within the last `RETRY_DELAY_S`; `overloaded` if too many calls wait for it;
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
    model = service.models.get(name)
    if model is None or model.loaded is None:
        _check_retry(name, lazy)
        raise ApiError("model_not_found", field="model")
    return model.loaded.model


def _check_retry(name: str, lazy: ListedModel) -> None:
    """Reject a call within `RETRY_DELAY_S` after a failed load.

    Raises:
        ApiError: `internal`.
    """
    seconds = 0.0 if lazy.retry_at is None else lazy.retry_at - time.monotonic()
    if seconds > 0:
        message = f"{name} failed to load; the log has the reason. Retry in {math.ceil(seconds)} s."
        raise ApiError("internal", message)


async def _load(service: Service, name: str, lazy: ListedModel) -> None:
    """Load a lazy model. A failure is recorded in `lazy`, from which each call makes its error."""
    try:
        async with service.model_locks[name]:
            if service.models.get(name) is lazy:  # otherwise a request has loaded or unloaded it
                await attach_loaded(service, await load_from_repository(service, name))
    except ApiError:
        lazy.retry_at = time.monotonic() + RETRY_DELAY_S
    finally:
        lazy.load = None


async def load_from_repository(service: Service, name: str) -> LoadedModel:
    """Load a bundle in a thread of its own; the caller holds the lock of the model.

    Raises:
        ApiError: `internal` if the bundle cannot be loaded; the reason is logged.
    """
    load = partial(service.repository.load, name, service.reserved_bytes(name))
    try:
        loaded = await run_in_daemon_thread(load)
    except INTERRUPTIONS:
        raise
    except BaseException as error:
        is_expected = isinstance(error, BundleError)
        logger.error("%s is not loaded: %s", name, error, exc_info=None if is_expected else error)
        raise ApiError("internal", f"{name} failed to load; the log has the reason.") from None
    logger.info("loaded %s in %.2f s", name, loaded.model.load_seconds)
    return loaded


async def attach_loaded(service: Service, loaded: LoadedModel) -> None:
    """Start to serve a loaded model."""
    await service.worker.add(loaded.model.name, loaded.engine)
    service.attach_model(loaded)
