"""Tests of the memory limit that docs/how-to/deploy.md states. They need root and a writable memory
cgroup.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from lab.bench.engine.memory import mixed_calls, send_all
from lab.bench.load import with_client
from lab.bench.server import free_port
from sightline.service.discovery import find_bundles

pytestmark = pytest.mark.cgroup

ROOT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 512 * 1024 * 1024
CALLS = 5000
MB = 1_000_000
START_TIMEOUT_S = 120


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Create a cgroup, of version 2 or 1, with 512 MiB of memory and no swap."""
    if (CGROUPS / "cgroup.controllers").exists():
        parent, limits = CGROUPS, {"memory.max": LIMIT, "memory.swap.max": 0}
        (parent / "cgroup.subtree_control").write_text("+memory")
    else:
        parent, limits = CGROUPS / "memory", {"memory.limit_in_bytes": LIMIT, "memory.swappiness": 0}
    folder = parent / f"sightline-test-{os.getpid()}"
    folder.mkdir()
    for name, value in limits.items():
        (folder / name).write_text(str(value))
    yield folder
    folder.rmdir()


@pytest.fixture
def server(cgroup: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a service with every shipped bundle inside the cgroup; yield its process and URL."""
    port = free_port()
    settings = {"SIGHTLINE_PORT": str(port), "SIGHTLINE_THREADS": "1", "SIGHTLINE_LOG_LEVEL": "warning"}
    settings["SIGHTLINE_WORKERS"] = "1"  # the process that is measured serves
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs")]
    process = subprocess.Popen([*enter, sys.executable, "-m", "sightline.service"], cwd=ROOT, env=os.environ | settings)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}/health/ready")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"the service ended with {process.returncode}"
        assert time.monotonic() < deadline, "the service was not ready in time"
        try:
            with urlopen(url, timeout=5):
                return
        except URLError:
            time.sleep(0.05)


def resident_mb(process: subprocess.Popen[bytes]) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024 / MB


def test_the_bundles_that_load_at_start_are_served_within_512_mib(
    server: tuple[subprocess.Popen[bytes], str], sentences: list[str]
) -> None:
    process, url = server
    assert resident_mb(process) <= 350
    manifests = list(find_bundles(ROOT / "bundles").values())
    assert sum(not manifest.lazy for manifest in manifests) == 7
    calls = list(itertools.islice(mixed_calls(manifests, sentences), CALLS))
    with_client(url, lambda client: send_all(client, calls))  # raises if a response is not 200
    assert process.poll() is None
    assert resident_mb(process) <= 450
