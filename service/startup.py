"""Checks and constants of every way to start the service: a process, workers, or Ray Serve."""

import resource
from collections.abc import Sequence

from sightline.base.errors import UsageError
from sightline.service.keys import Key, read_keys
from sightline.service.quotas import open_limiter
from sightline.service.settings import Settings
from sightline.service.traces import check_traces

# Seconds after which a busy thread releases the interpreter lock. The engine's thread requests the
# lock after every step. With Python's default of 5 ms it would wait longer than most steps take
# whenever the event loop is busy.
SWITCH_INTERVAL_S = 0.0005
MIN_DESCRIPTORS = 64  # with fewer, every connection would be rejected


def check_settings(settings: Settings) -> Sequence[Key]:
    """Check what the settings name, and return the API keys.

    Raises `UsageError` if the process may open too few files, or quotas or traces cannot be used,
    and `CommandError` if the keys cannot be used.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < MIN_DESCRIPTORS:
        raise UsageError(
            f"the process may open only {most} files, and needs {MIN_DESCRIPTORS}, and one more for each connection; "
            "raise the limit, such as with `ulimit -n 4096`"
        )
    if settings.quota_storage_url is not None:
        open_limiter(settings.quota_storage_url)
    check_traces()
    return () if settings.keys is None else read_keys(settings.keys)
