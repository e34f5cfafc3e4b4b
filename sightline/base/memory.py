"""Limits of the memory of this process, which the kernel enforces."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Limit the private memory of this process and of its children to what it is now, and more."""
    with suppress(OSError, StopIteration):  # other systems than Linux have no such file
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
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
