"""Start servers, ours and third-party ones, each in its own process on a free port."""

import contextlib
import http.client
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.bench.process import Process, family_cpu_seconds

START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready. Its figures are sums over all of its processes."""

    port: int
    process: Process
    seconds_to_ready: float  # from starting the process to the first 200 of its health check

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory_mb(self, name: str) -> float:
        """Return memory in 10^6 bytes: VmRSS (resident), VmHWM (peak resident), or Pss, which
        counts memory that processes share once.
        """
        file = "smaps_rollup" if name == "Pss" else "status"
        texts = [path.read_text(encoding="utf-8") for path in self._paths(file)]
        kilobytes = [line.split()[1] for text in texts for line in text.splitlines() if line.startswith(f"{name}:")]
        if not kilobytes:
            raise RuntimeError(f"/proc/PID/{file} has no field {name}")
        return sum(map(int, kilobytes)) * 1024 / 1e6

    def num_descriptors(self) -> int:
        """Return the number of open descriptors, sockets included."""
        return sum(len(os.listdir(path)) for path in self._paths("fd"))

    def num_threads(self) -> int:
        return sum(len(os.listdir(path)) for path in self._paths("task"))

    def num_processes(self) -> int:
        return len(family_cpu_seconds(self.process.pid))

    def _paths(self, name: str) -> list[Path]:
        return [Path(f"/proc/{pid}/{name}") for pid in family_cpu_seconds(self.process.pid)]


def serving(bundles: Path, **settings: str | int | float | Path) -> contextlib.AbstractContextManager[RunningServer]:
    """Start `python -m sightline.service` with a folder of bundles, and settings by their names in
    lower case, such as `max_rows=64`. Raises as `serving_command` does.
    """
    port = free_port()
    values = {"bundles": bundles, "host": "127.0.0.1", "port": port, "log_level": "warning", "drain_s": 0, **settings}
    environment = {f"SIGHTLINE_{name.upper()}": str(value) for name, value in values.items()}
    return serving_command([sys.executable, "-m", "sightline.service"], port, "/health/ready", environment)


@contextlib.contextmanager
def serving_command(
    command: Sequence[str], port: int, health: str, environment: Mapping[str, str], log: Path | None = None
) -> Iterator[RunningServer]:
    """Start a server and end it when the block ends.

    Args:
        health: The path that answers 200 once the server is ready.
        environment: Variables added to those of this process; `SIGHTLINE_*` variables are not
            inherited.
        log: File for the standard error of the server; that of this process by default.

    Raises:
        RuntimeError: The process ends or is not ready in time.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_")}
    started = time.perf_counter()
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") if log is not None else contextlib.nullcontext() as errors:
        process = Process(command, {**inherited, **environment}, stderr=errors)
    shown = " ".join(Path(word).name for word in command[:3]) + (f" (log in {log})" if log else "")
    try:
        while not _is_ready(port, health):
            if process.exit_code is not None:
                raise RuntimeError(f"{shown} exited with code {process.exit_code} before it was ready")
            if time.perf_counter() - started > START_TIMEOUT_S:
                raise RuntimeError(f"{shown} was not ready within {START_TIMEOUT_S} s")
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
