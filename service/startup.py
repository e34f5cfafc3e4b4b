"""Checks and constants of every way to start the service: a process, workers, or Ray Serve."""

from collections.abc import Sequence

from sightline.service.keys import Key, read_keys
from sightline.service.quotas import open_limiter
from sightline.service.settings import Settings
from sightline.service.traces import check_traces

# Seconds after which a busy thread releases the interpreter lock. The engine's thread requests the
# lock after every step. With Python's default of 5 ms it would wait longer than most steps take
# whenever the event loop is busy.
SWITCH_INTERVAL_S = 0.0005


def check_settings(settings: Settings) -> Sequence[Key]:
    """Check what the settings name, and return the API keys.

    Raises:
        KeysError: the file of keys cannot be used.
        QuotaStorageError: the storage of quotas cannot be used.
        TracesError: traces cannot be sent.
    """
    if settings.quota_storage_url is not None:
        open_limiter(settings.quota_storage_url)
    check_traces()
    return () if settings.keys is None else read_keys(settings.keys)
