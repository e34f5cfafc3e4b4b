"""Services with two workers over a toy bundle."""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import wait_until

START_S = 120.0
Body = dict[str, Any]


@dataclass(eq=False)
class WorkerService:
    """A supervisor with its workers, as a process."""

    folder: Path
    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)  # its log
    port: int = 0

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.connect()
        return connection

    def ask(self, path: str, body: Any = None, connection: http.client.HTTPConnection | None = None) -> tuple[int, Any]:
        """Send a request, over a connection of its own by default; return status and document."""
        with contextlib.ExitStack() as stack:
            if connection is None:
                connection = stack.enter_context(contextlib.closing(self.connect()))
            content = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, content, headers)
            response = connection.getresponse()
            data = response.read()
            is_json = response.headers["content-type"] == "application/json"
            return response.status, json.loads(data) if is_json else data.decode()

    def metric(self, sample: str) -> float:
        """Return the value of a sample of `/metrics`."""
        page = self.ask("/metrics")[1]
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(sample))

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        return [int(pid) for pid in children.split()]

    def logged(self, message: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if message in line["message"]]

    def wait_ready(self) -> None:
        wait_until(lambda: self.ask("/health/ready")[0] == 200, START_S)


Run = Callable[..., contextlib.AbstractContextManager[WorkerService]]


@pytest.fixture(scope="session")
def run(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that starts a service with two workers and waits until it listens."""

    @contextlib.contextmanager
    def start(
        workers: int | str = 2,
        copies: tuple[str, ...] = ("toy",),
        program: tuple[str, ...] = ("-m", "sightline.service"),
        **settings: Any,
    ) -> Iterator[WorkerService]:
        folder = tmp_path_factory.mktemp("served")
        for name in copies:
            copy_bundle(bundle, folder, name)
        values = {
            "bundles": folder,
            "port": 0,
            "threads": 1,
            "shutdown_timeout_s": 5,
            "drain_s": 0,
            "workers": workers,
            **settings,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_")}
        environment |= {f"SIGHTLINE_{name.upper()}": str(value) for name, value in values.items()}
        command = [sys.executable, *program]
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            service = WorkerService(folder, process)
            reader = threading.Thread(target=_read_log, args=(service,), daemon=True)
            reader.start()
            try:
                wait_until(lambda: bool(service.logged("listening")) or process.poll() is not None, START_S)
                if service.logged("listening"):
                    service.port = service.logged("listening")[0]["port"]
                yield service
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()

    return start


def copy_bundle(bundle: Path, folder: Path, name: str, **changes: Any) -> None:
    """Copy a bundle under another name of its model."""
    shutil.copytree(bundle, folder / name, dirs_exist_ok=True)
    manifest = json.loads((folder / name / "manifest.json").read_text(encoding="utf-8"))
    content = json.dumps({**manifest, "name": name, **changes})
    (folder / name / "manifest.json").write_text(content, encoding="utf-8")


def _read_log(service: WorkerService) -> None:
    assert service.process.stdout is not None
    for line in service.process.stdout:
        try:
            service.lines.append(json.loads(line))
        except ValueError:  # a traceback
            service.lines.append({"message": line, "level": "error"})


@dataclass(eq=False)
class Load:
    """Clients that send requests over connections that they keep, until `stop`."""

    service: WorkerService
    num_clients: int = 6
    pause_s: float = 0.0  # of a client after each response
    statuses: list[int | str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each response came

    def __enter__(self) -> "Load":
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        body = {"inputs": "A man sleeps.", "parameters": {"max_new_tokens": 4}}
        while not self._is_over.is_set():
            try:
                if connection is None:
                    connection = self.service.connect()
                self.statuses.append(self.service.ask("/v1/generate", body, connection)[0])
            except (OSError, http.client.HTTPException) as error:
                self.statuses.append(type(error).__name__)
                if connection is not None:
                    connection.close()
                connection = None
            self.times.append(time.monotonic())
            time.sleep(self.pause_s)
        if connection is not None:
            connection.close()
