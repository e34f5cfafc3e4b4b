"""A Redis that keeps quotas."""

import contextlib
import subprocess
from collections.abc import Iterator

import pytest

from lab.bench.server import free_port


@contextlib.contextmanager
def running_redis() -> Iterator[str]:
    """Run a Redis without files; yield its URL."""
    port = free_port()
    try:
        process = subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
        )
    except FileNotFoundError:
        pytest.fail("this test needs Debian's package redis-server")
    with process:
        yield f"redis://127.0.0.1:{port}/0"
        process.terminate()
