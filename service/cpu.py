"""How many threads this process may keep busy: what its container allows, not what the host has."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_threads(cgroup: Path = CGROUP) -> int:
    """The CPU quota rounded up, and never more than the cores that the process may run on; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota_v2(path: Path) -> float | None:
    """`cpu.max` holds "QUOTA PERIOD", or "max PERIOD" where there is no quota."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    """`cpu.cfs_quota_us` is -1 where there is no quota."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None
