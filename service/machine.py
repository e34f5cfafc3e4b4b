"""Threads and memory that this process may use: those of its container, not of the host."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


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


def usable_memory(cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Return the smallest memory limit of the process's control groups, at most the machine's memory, in bytes."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        limit
        for folder in _own_folders(cgroup, own_cgroups)
        for name in ("memory.max", "memory.limit_in_bytes")  # of versions 2 and 1
        if (limit := _read_limit(folder / name)) is not None
    ]
    return min([installed, *limits])


def _own_folders(cgroup: Path, own_cgroups: Path) -> list[Path]:
    """The folders of the control groups that may limit the process's memory, with their ancestors."""
    folders = [cgroup, cgroup / "memory"]
    try:
        lines = own_cgroups.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        lines = []
    for line in lines:  # "0::/path" in version 2, "9:memory:/path" in version 1
        _, controllers, path = line.split(":", 2)
        if "memory" in (controllers or "memory").split(","):
            own = (cgroup / controllers if controllers else cgroup) / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(cgroup))]
    return folders


def _read_limit(path: Path) -> int | None:
    """A limit in bytes; None if there is none ("max")."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
