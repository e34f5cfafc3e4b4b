"""The number of worker processes, and the share of each of the limits of the service."""

from sightline.base.bundle import BundleError, Manifest
from sightline.base.machine import available_memory, usable_threads
from sightline.service.discovery import find_bundles
from sightline.service.metrics import SHARED_SETTINGS
from sightline.service.runtime.thread_counts import threads_alone
from sightline.service.settings import Settings

PROCESS_BYTES = 160_000_000  # a worker without models; measured, see docs/how-to/tune.md
MIN_SHARE = {"max_waiting_sequences": 32, "max_waiting_tokens": 4096, "max_rows": 8}


def max_workers(settings: Settings) -> int:
    """Return the largest useful number of worker processes.

    It is the number of the setting, or that of the cores, divided by the threads of a graph if they
    are set, if the memory suffices. A GPU is used by one process.
    """
    if settings.workers != "auto":
        return int(settings.workers)
    cores = usable_threads() // max(1, settings.threads)
    if cores <= 1 or settings.provider == "cuda":
        return 1
    manifests = manifests_of(settings)
    if not manifests or any(manifest.rows is not None for manifest in manifests):
        return 1
    memory = available_memory()
    if memory is None:
        return cores
    worker_bytes = PROCESS_BYTES
    for manifest in manifests:
        has_two_sessions = not settings.threads and threads_alone(manifest.loaded_bytes, cores) > 1
        worker_bytes += manifest.loaded_bytes * (2 if has_two_sessions else 1)
    return max(1, min(cores, memory // (2 * worker_bytes)))  # the other half is for states and responses


def manifests_of(settings: Settings) -> list[Manifest]:
    """Return the manifests of the bundles; none if there are none that can be read."""
    try:
        return list(find_bundles(settings.bundles, (), lambda folder, error: None, settings.only).values())
    except BundleError:  # a worker reports it
        return []


def share_of(settings: Settings, num_workers: int) -> Settings:
    """Return the settings of one worker, whose limits are its share of those of the service."""
    limits: dict[str, int] = {name: getattr(settings, name) for name in SHARED_SETTINGS}
    shares = {name: max(-(-limit // num_workers), min(limit, MIN_SHARE.get(name, 0))) for name, limit in limits.items()}
    shares["max_waiting_bytes"] = max(shares["max_waiting_bytes"], settings.max_body_bytes)
    return settings.model_copy(update=shares)
