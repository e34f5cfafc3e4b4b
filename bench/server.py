"""A service started as a user would start it, in a process of its own, on a free port."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunningServer:
    port: int
    pid: int
    seconds_to_ready: float  # from exec to the first 200 of /health/ready

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_mb(self) -> float:
        """VmRSS in 10^6 bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise RuntimeError("no VmRSS in /proc/PID/status")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def serving(bundles: Path, timeout_s: float = 60.0, **settings: str | int) -> Iterator[RunningServer]:
    """Start `python -m service` over a folder of bundles and stop it at the end.

    Args:
        settings: further settings by their names in small letters, as `max_rows=64`.

    Raises:
        RuntimeError: the process ends, or is not ready within `timeout_s` seconds.
    """
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_")}
    wanted = {"bundles": bundles, "host": "127.0.0.1", "port": port, "log_level": "warning", **settings}
    environment |= {f"SIGHTLINE_{name.upper()}": str(value) for name, value in wanted.items()}
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "service"], env=environment, stdout=subprocess.DEVNULL)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise RuntimeError(f"the service ended with {process.returncode} before it was ready")
            if time.perf_counter() - started > timeout_s:
                raise RuntimeError(f"the service was not ready within {timeout_s} s")
            time.sleep(0.005)
        yield RunningServer(port, process.pid, time.perf_counter() - started)
    finally:
        process.terminate()
        process.wait(timeout=60)
