"""Checks and constants of every way to start the service: a process, workers, or Ray Serve."""

import resource
from collections.abc import Sequence

from sightline.service.keys import Key, KeysError, read_keys
from sightline.service.quotas import QuotaStorageError, open_limiter
from sightline.service.settings import Settings, SettingsError, env_name
from sightline.service.traces import check_traces

# Seconds after which a busy thread releases the interpreter lock. The engine's thread requests the
# lock after every step. With Python's default of 5 ms it would wait longer than most steps take
# whenever the event loop is busy.
SWITCH_INTERVAL_S = 0.0005
MIN_DESCRIPTORS = 64  # with fewer, every connection would be rejected


def check_settings(settings: Settings) -> Sequence[Key]:
    """Check what the settings name, and return the API keys.

    Raises `SettingsError` if the process may open too few files, and `KeysError`,
    `QuotaStorageError` or `TracesError` if the keys, quotas or traces cannot be used.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < MIN_DESCRIPTORS:
        raise SettingsError(
            f"the process may open only {most} files, and needs {MIN_DESCRIPTORS}, and one more for each connection; "
            "raise the limit, such as with `ulimit -n 4096`"
        )
    if settings.quota_storage_url is not None:
        try:
            open_limiter(settings.quota_storage_url)
        except QuotaStorageError as error:
            raise QuotaStorageError(f"{env_name('quota_storage')}: {error}") from None
    check_traces()
    try:
        return () if settings.keys is None else read_keys(settings.keys)
    except KeysError as error:
        raise KeysError(f"{env_name('keys')}: {error}") from None
