"""Start services as users do, each in its own process on a free port."""

import contextlib
import http.client
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.process import Process

START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RunningServer:
    port: int
    process: Process
    seconds_to_ready: float  # from starting the process to the first 200 of its health check

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory_mb(self, name: str) -> float:
        """Return a field of `/proc/PID/status` in 10^6 bytes: VmRSS (resident) or VmHWM (peak
        resident).
        """
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise RuntimeError(f"/proc/PID/status has no field {name}")

    def num_descriptors(self) -> int:
        """Return the number of open descriptors, sockets included."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


def serving(
    bundles: Path, module: str = "service", *, folder: Path | None = None, **settings: str | int | float
) -> contextlib.AbstractContextManager[RunningServer]:
    """Start `python -m service`, or a module that reads the same settings, with a folder of
    bundles.

    Args:
        bundles: The folder of bundles.
        module: The module to run.
        folder: Working directory, which decides the checkout that is served; that of this process
            by default.
        settings: More settings by their names in lower case, such as `max_rows=64`.

    Raises:
        RuntimeError: The process ends or is not ready in time.
    """
    port = free_port()
    values = {"bundles": bundles, "host": "127.0.0.1", "port": port, "log_level": "warning", "drain_s": 0, **settings}
    environment = {f"SIGHTLINE_{name.upper()}": str(value) for name, value in values.items()}
    return serving_command([module], port, "/health/ready", environment, folder)


@contextlib.contextmanager
def serving_command(
    arguments: Sequence[str], port: int, health: str, environment: Mapping[str, str], folder: Path | None = None
) -> Iterator[RunningServer]:
    """Start a server and end it when the block ends.

    Args:
        arguments: Command line after `python -m`.
        port: The port that the server listens on.
        health: The path that answers 200 once the server is ready.
        environment: Variables added to those of this process; `SIGHTLINE_*` variables are not
            inherited.
        folder: Working directory.

    Raises:
        RuntimeError: The process ends or is not ready in time.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_")}
    started = time.perf_counter()
    process = Process(arguments, {**inherited, **environment}, folder=folder)
    try:
        while not _is_ready(port, health):
            if process.exit_code is not None:
                raise RuntimeError(f"{arguments[0]} exited with code {process.exit_code} before it was ready")
            if time.perf_counter() - started > START_TIMEOUT_S:
                raise RuntimeError(f"{arguments[0]} was not ready within {START_TIMEOUT_S} s")
            time.sleep(0.005)
        yield RunningServer(port, process, time.perf_counter() - started)
    finally:
        process.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(port: int, health: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", health)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
