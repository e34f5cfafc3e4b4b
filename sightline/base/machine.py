"""CPU threads and memory available to this process, within the limits of its container."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_threads(cgroup: Path = CGROUP) -> int:
    """Return the CPU quota, rounded up, but at most the number of cores available; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota_v2(path: Path) -> float | None:
    """Read a quota in cores from `cpu.max`: "QUOTA PERIOD", or "max PERIOD" without a quota."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    """Read a quota in cores from `cpu.cfs_quota_us`, which is -1 without a quota."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None


def usable_memory(cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Return the bytes of memory that this process may use.

    This is the smallest limit of the process's control groups, and at most the memory of the
    machine.
    """
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        limit
        for folder in _own_folders(cgroup, own_cgroups)
        for name in ("memory.max", "memory.limit_in_bytes")  # cgroup versions 2 and 1
        if (limit := _read_limit(folder / name)) is not None
    ]
    return min([installed, *limits])


def available_memory(cgroup: Path = CGROUP) -> int | None:
    """Return the bytes of memory that this process can still use, or None if they are unknown.

    They are the smaller one of the available memory of the machine and the rest of the limit of the
    control group, such as that of a container.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # another system than Linux
        return None
    bounds = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_read_limit(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        bounds.append(limit - used)
    return max(0, min(bounds)) if bounds else None


def _own_folders(cgroup: Path, own_cgroups: Path) -> list[Path]:
    """Return the folders of the process's control groups and of their ancestors."""
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
    """Return the bytes in a file, or None if there is no limit ("max")."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
