"""CPU threads and memory available to this process, within the limits of its container."""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# The files of the limit of a group and of the bytes that it uses, in cgroup versions 2 and 1.
MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def usable_threads(cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Return the number of cores, or the smallest CPU quota, rounded up, of the control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _own_folders("cpu", cgroup, own_cgroups):
        version_1 = *_numbers(folder / "cpu.cfs_quota_us"), *_numbers(folder / "cpu.cfs_period_us")
        numbers = _numbers(folder / "cpu.max") or version_1
        if len(numbers) == 2 and numbers[0] > 0:
            cores = min(cores, math.ceil(numbers[0] / numbers[1]))
    return cores


def usable_memory(cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Return the bytes of memory that this process may use: the smallest limit of its control
    groups, and at most the memory of the machine.
    """
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *(limit for limit, _ in _memory_limits(cgroup, own_cgroups))])


def available_memory(cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> int | None:
    """Return the bytes of memory that this process can still use, or None if they are unknown.

    They are the smallest one of the available memory of the machine and the rests of the limits of
    the process's control groups, such as that of a container.
    """
    bounds = _proc_bytes("meminfo", "MemAvailable")
    bounds += [limit - used for limit, used in _memory_limits(cgroup, own_cgroups)]
    return max(0, min(bounds)) if bounds else None


def limit_memory(num_bytes: int) -> None:
    """Limit the private memory of this process and of its children to what it is now, and more."""
    for used in _proc_bytes("self/status", "VmData"):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = used + num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Raise `MemoryError` if this process needs that much memory more."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_memory(num_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _proc_bytes(file: str, field: str) -> list[int]:
    """Return the size in a field of a file of `/proc`; none on other systems than Linux."""
    try:
        lines = Path("/proc", file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")]


def _memory_limits(cgroup: Path, own_cgroups: Path) -> list[tuple[int, int]]:
    """Return the limits of memory of the process's control groups, each with the bytes in use."""
    return [
        (limit, _used_bytes(folder, used_name))
        for folder in _own_folders("memory", cgroup, own_cgroups)
        for limit_name, used_name in MEMORY_FILES
        for limit in _numbers(folder / limit_name)
    ]


def _used_bytes(folder: Path, name: str) -> int:
    """Return the memory that a control group uses, without cached files, which the system drops."""
    try:
        pairs = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        statistics = {key: int(value) for key, value in pairs}
    except (OSError, ValueError):
        statistics = {}
    prefix = "total_" if "total_cache" in statistics else ""  # version 1 counts groups below only in totals
    cached = sum(statistics.get(f"{prefix}{state}_file", 0) for state in ("active", "inactive"))
    return sum(_numbers(folder / name)) - cached


def _own_folders(controller: str, cgroup: Path, own_cgroups: Path) -> list[Path]:
    """Return the folders of the process's "cpu" or "memory" control groups, and their ancestors."""
    folders = [cgroup, cgroup / controller]
    try:
        lines = [os.fsdecode(line) for line in own_cgroups.read_bytes().splitlines()]
    except OSError:
        lines = []
    for line in lines:  # "0::/path" in version 2, "9:memory:/path" in version 1
        _, controllers, path = line.split(":", 2)
        if controller in (controllers or controller).split(","):
            own = (cgroup / controllers if controllers else cgroup) / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(cgroup))]
    return folders


def _numbers(path: Path) -> tuple[int, ...]:
    """Return the numbers in a file; none if it cannot be read, or has no limit ("max")."""
    try:
        return tuple(map(int, path.read_text(encoding="ascii").split()))
    except (OSError, ValueError):
        return ()


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not tell."""
    return sum(_numbers(Path("/proc/self/statm"))[1:2]) * os.sysconf("SC_PAGE_SIZE")
