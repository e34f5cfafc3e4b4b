"""The service in Ray clusters that run on this machine."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sightline.service.keys import add_key
from tests.service.conftest import wait_until
from tests.service.workers.conftest import copy_bundle
from tests.support.redis import running_redis

START_S = 45.0
NUM_BUNDLES = 16  # they load for seconds, in which a replica must get no request
BIN = Path(sys.executable).parent
SENTENCE = "A man sleeps in the rain and waits for a bus."


def free_port() -> int:
    """Return a free port below those that the system gives to Ray's processes."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            port = 20_000 + secrets.randbelow(10_000)
            probe.bind(("127.0.0.1", port))
            return port


def ray_environment() -> dict[str, str]:
    """Return the variables for a cluster beside others on this machine."""
    printed = subprocess.run(
        [sys.executable, "-m", "sightline.service.ray_command"], capture_output=True, text=True, check=True
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SIGHTLINE_", "RAY_"))}
    variables = dict(shlex.split(line)[1].split("=", 1) for line in printed.stdout.splitlines())
    ports = {
        f"RAY_SERVE_{name}": str(free_port())
        for name in (
            "HAPROXY_METRICS_PORT",
            "HAPROXY_STATS_PORT",
            "FALLBACK_PROXY_HTTP_PORT",
            "FALLBACK_PROXY_GRPC_PORT",
        )
    }
    # A token of their own keeps clusters of other tests apart.
    ports["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    quick = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return {**inherited, **variables, **ports, **quick}


@dataclass
class Load:
    """Results of requests under load: status (0 for a broken connection) and time of the start."""

    results: list[tuple[int, float]] = field(default_factory=list)
    is_running: bool = True

    def count(self, since: float = 0.0) -> Counter[int]:
        """Count the statuses of requests that began after a time."""
        return Counter(status for status, started in self.results if started >= since)


@dataclass
class RayService:
    """A service in Ray, as a client and Prometheus see it."""

    port: int
    targets: Path
    environment: Mapping[str, str]
    key: str
    admin_key: str

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=40)

    def request(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request with the key of a user; return status, headers and body."""
        connection = self.connect()
        with contextlib.closing(connection):
            own = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", **(headers or {})}
            connection.request("GET" if body is None else "POST", path, body and json.dumps(body), own)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def is_ready(self) -> bool:
        try:
            return self.request("/health/ready")[0] == 200
        except OSError:
            return False

    @property
    def replicas(self) -> dict[int, str]:
        """Addresses of the metrics of the replicas, by their process ids."""
        found: dict[int, str] = {}
        for path in self.targets.glob("*.json"):
            ((address,),) = [one["targets"] for one in json.loads(path.read_text(encoding="utf-8"))]
            found[int(path.stem.rpartition("-")[2])] = address
        return {pid: address for pid, address in found.items() if self._can_connect(address)}

    def _can_connect(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError:
            return False
        return True

    def metrics(self, address: str) -> str | None:
        """Return the page of a replica; None if it does not answer."""
        connection = http.client.HTTPConnection(address, timeout=10)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {self.admin_key}"})
                response = connection.getresponse()
                text = response.read().decode()
            except OSError:
                return None
        assert response.status == 200, text
        return text

    def metric(self, sample: str) -> float:
        """Return the sum of a sample over all replicas."""
        pages = [self.metrics(address) or "" for address in self.replicas.values()]
        return sum(float(line.split()[-1]) for page in pages for line in page.splitlines() if line.startswith(sample))

    @contextlib.contextmanager
    def under_load(self, clients: int = 8, new_tokens: int = 12) -> Iterator[Load]:
        """Send requests all the time, each client over connections that it keeps open."""
        load = Load()
        parameters = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        body = json.dumps({"inputs": SENTENCE, "parameters": parameters})
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}

        def ask() -> None:
            connection = self.connect()
            while load.is_running:
                started = time.monotonic()
                try:
                    connection.request("POST", "/v1/generate", body, headers)
                    response = connection.getresponse()
                    response.read()
                    load.results.append((response.status, started))
                except (OSError, http.client.HTTPException):
                    load.results.append((0, started))
                    connection.close()
            connection.close()

        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            running = [pool.submit(ask) for _ in range(clients)]
            try:
                yield load
            finally:
                load.is_running = False
        for one in running:
            one.result()


@contextlib.contextmanager
def program(command: list[str], environment: Mapping[str, str], lines: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program whose output is added to `lines`, and end it."""
    with subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        stdout = process.stdout
        threading.Thread(target=lambda: lines.extend(stdout), daemon=True).start()
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


@pytest.fixture
def new_service(bundle: Path, tmp_path: Path) -> RayService:
    """A service with keys that is not started: its folder of bundles is `targets/../bundles`."""
    for number in range(NUM_BUNDLES):
        copy_bundle(bundle, tmp_path / "bundles", f"toy-{number}")
    keys = tmp_path / "keys.json"
    key, admin_key = add_key(keys, "alice", "use"), add_key(keys, "prometheus", "admin")
    return RayService(free_port(), tmp_path / "targets", ray_environment(), key, admin_key)


@pytest.fixture
def redis() -> Iterator[str]:
    with running_redis() as url:
        yield url


def processes(pattern: str, session: str | None = None) -> dict[int, str]:
    """Return the command lines of running processes that match a pattern, by process id.

    Args:
        pattern: regular expression.
        session: text that the environment of the process must contain.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            variables = (folder / "environ").read_bytes().decode(errors="replace") if session else ""
            if re.search(pattern, line) and (session is None or session in variables):
                found[int(folder.name)] = line
    return found


def arguments(service: RayService, **settings: Any) -> list[str]:
    """Return the flags of `sightline serve --ray`."""
    folder = service.targets.parent
    values = {
        "bundles": folder / "bundles",
        "keys": folder / "keys.json",
        "default_model": "toy-0",
        "port": service.port,
        "metrics_targets": service.targets,
        **settings,
    }
    return ["--ray", *(word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def wait_for(condition: Any, lines: list[str], seconds: float = START_S) -> None:
    try:
        wait_until(condition, seconds)
    except AssertionError:
        raise AssertionError("".join(lines[-40:])) from None
