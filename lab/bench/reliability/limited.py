"""Control groups with a memory limit, which needs root, for both versions of Linux's interface."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    folder: Path
    is_version_1: bool

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Start the processes of the block in the group, which counts all memory that they
        allocate.
        """
        own = (_own_group(self.is_version_1) / "cgroup.procs").resolve()
        pid = str(os.getpid())
        (self.folder / "cgroup.procs").write_text(pid, encoding="ascii")
        try:
            yield
        finally:
            own.write_text(pid, encoding="ascii")

    @property
    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.is_version_1 else "memory.peak"
        return int((self.folder / name).read_text(encoding="ascii"))


def _own_group(is_version_1: bool) -> Path:
    """Return the folder of this process's control group."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").split():
        _, controllers, path = line.split(":", 2)
        if controllers == ("memory" if is_version_1 else ""):
            return (CGROUP / "memory" if is_version_1 else CGROUP) / path.lstrip("/")
    raise FileNotFoundError("this process is in no control group with a memory controller")


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Create a group whose processes share a memory limit; it is removed after they have ended.
    Raises `OSError` without root or a memory controller.
    """
    is_version_1 = (CGROUP / "memory").is_dir()
    folder = (CGROUP / "memory" if is_version_1 else CGROUP) / f"sightline-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.limit_in_bytes" if is_version_1 else "memory.max"
        (folder / name).write_text(str(limit_bytes), encoding="ascii")
        yield MemoryGroup(folder, is_version_1)
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)
