"""The configurations of nginx, HAProxy and Caddy in deploy/, each in front of two services.

Each proxy runs with the shipped file, in which only addresses and the paths of certificates are
replaced.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab.bench.process import Process
from lab.bench.server import free_port, serving_command
from sightline.loadtest.client import Client
from sightline.loadtest.load import Load, run_load
from sightline.loadtest.outcome import Success
from tests.service import conftest
from tests.service.conftest import MakeBackend, Serve, wait_until

pytestmark = pytest.mark.proxies
make_backend, serve, tokenizer, _quick_uvicorn = (  # fixtures
    conftest.make_backend,
    conftest.serve,
    conftest.tokenizer,
    conftest._quick_uvicorn,
)

PROXIES = ("nginx", "haproxy", "caddy")
PACKAGES = {"nginx": "nginx-light", "haproxy": "haproxy", "caddy": "caddy"}
MODEL = "multi30k-en-de"
HOST = "models.example.org"
SENTENCE = "Two girls are playing with a small brown dog on the beach."
RATES = {False: 45.0, True: 15.0}  # requests per second, unary and streamed
SLICE_S = 2.0
TIMEOUT_S = 40.0
NUM_CALLS, NUM_CLIENTS = 60, 12  # of the test of overload


@dataclass
class Instances:
    """Two services on fixed ports, which can be restarted."""

    environment: dict[str, str]
    ports: Sequence[int] = field(default_factory=lambda: (free_port(), free_port()))
    _running: dict[int, contextlib.ExitStack] = field(default_factory=dict)

    def start(self, port: int) -> None:
        """Start a service, and wait until it is ready."""
        self._running[port] = contextlib.ExitStack()
        environment = {**self.environment, "SIGHTLINE_PORT": str(port)}
        command = serving_command([sys.executable, "-m", "sightline.service"], port, "/health/ready", environment)
        self._running[port].enter_context(command)

    def stop(self, port: int) -> None:
        """Send SIGTERM to a service, and wait until it has ended."""
        self._running.pop(port).close()

    def restart_in_turn(self) -> None:
        for port in self.ports:
            self.stop(port)
            self.start(port)

    def stop_all(self) -> None:
        for port in list(self._running):
            self.stop(port)

    def metric(self, name: str, labels: str) -> float:
        """Return the sum of a metric over both services.

        Args:
            name: name of the metric.
            labels: beginning of the labels of the samples to add.
        """
        total = 0.0
        for port in self.ports:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
            connection.close()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{labels}"))
        return total


Start = Callable[..., Instances]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start two services with the shipped model. They have the default settings of a service."""
    bundles = tmp_path_factory.mktemp("bundles")
    shutil.copytree(f"bundles/{MODEL}", bundles / MODEL)
    with contextlib.ExitStack() as started:

        def start_instances(**settings: Any) -> Instances:
            values = {"bundles": bundles, "workers": 1, "log_level": "warning", "allowed_hosts": HOST, **settings}
            instances = Instances({f"SIGHTLINE_{name.upper()}": str(value) for name, value in values.items()})
            started.callback(instances.stop_all)
            for port in instances.ports:
                instances.start(port)
            return instances

        yield start_instances


@pytest.fixture(scope="module")
def instances(start: Start) -> Instances:
    return start()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a self-signed certificate, with its key in the same file."""
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    names = f"subjectAltName=DNS:{HOST},DNS:localhost"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    command += ["-days", "1", "-subj", f"/CN={HOST}", "-addext", names, "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(Path(f"{path}.crt").read_text(encoding="utf-8"))
    path.chmod(0o644)
    return path


def replaced(file: str, *changes: tuple[str, str]) -> str:
    """Return the text of a file of deploy/ with changes, each of which must apply."""
    text = (Path("deploy") / file).read_text(encoding="utf-8")
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text)
        assert count, f"deploy/{file} has no {pattern}"
    return text


def configure(
    name: str, folder: Path, port: int, ports: Sequence[int], certificate: Path, *changes: tuple[str, str]
) -> list[str]:
    """Write the configuration of a proxy, and return the command that starts it.

    Args:
        name: name of the proxy.
        folder: folder to write to.
        port: port of the proxy.
        ports: ports of the services.
        certificate: file with the certificate and its key.
        changes: other changes of the shipped file, as patterns and replacements.
    """
    changes = (*changes, *((rf"127\.0\.0\.1:800{i}", f"127.0.0.1:{one}") for i, one in enumerate(ports)))
    if name == "nginx":
        address, paths = (r"listen 443", f"listen 127.0.0.1:{port}"), (r"/etc/ssl/\S+(?=;)", str(certificate))
        changes = (*changes, (r"listen \[::\]:443", f"listen [::1]:{port}"))
        site = folder / "sightline.conf"
        site.write_text(replaced("nginx/sightline.conf", address, paths, *changes), encoding="utf-8")
        # The package's own nginx.conf includes the site in the same place.
        temporary = "".join(
            f"{one}_temp_path {folder}; " for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        main = f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {temporary}include {site}; }}"
        (folder / "nginx.conf").write_text(main, encoding="utf-8")
        return ["nginx", "-e", "stderr", "-c", str(folder / "nginx.conf")]
    if name == "haproxy":
        address, paths = (r"bind :::443", f"bind :::{port}"), (r"/etc/haproxy/\S+\.pem", str(certificate))
        if os.getuid() != 0:
            changes = (*changes, (r"(?m)^ +(user|group) haproxy$", ""))
        file = folder / "haproxy.cfg"
        file.write_text(replaced("haproxy/haproxy.cfg", address, paths, *changes), encoding="utf-8")
        return ["haproxy", "-db", "-f", str(file)]
    site_of_test = f"https://localhost:{port}, https://{HOST}:{port} {{\n\ttls {certificate} {certificate}"
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
    file = folder / "Caddyfile"
    text = replaced("caddy/Caddyfile", (rf"(?m)^{re.escape(HOST)} {{$", site_of_test), *changes)
    file.write_text(options + text, encoding="utf-8")
    return ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"]


@dataclass(frozen=True)
class Proxy:
    """A running proxy."""

    port: int
    certificate: Path

    def connect(self, address: str = "127.0.0.1") -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.certificate))
        return context.wrap_socket(socket.create_connection((address, self.port), TIMEOUT_S), server_hostname=HOST)

    def request(self, body: Any, path: str = "/v1/generate") -> tuple[int, bytes, float]:
        """Send a request; return the status, the body, and the seconds in which it arrived."""
        data, times, content = json.dumps(body).encode(), [], b""
        with self.connect() as sock, contextlib.closing(http.client.HTTPConnection(HOST)) as connection:
            connection.sock = sock
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while part := response.read1():
                times.append(time.monotonic())
                content += part
            return response.status, content, times[-1] - times[0]


@contextlib.contextmanager
def running(command: Sequence[str], port: int, certificate: Path, folder: Path) -> Iterator[Proxy]:
    """Run a proxy."""
    if shutil.which(command[0]) is None:
        pytest.fail(f"{command[0]} is missing; install Debian's package with `apt-get install {PACKAGES[command[0]]}`.")
    environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    log = folder / "log"
    with log.open("wb") as errors:
        process = Process(command, environment, stderr=errors)
    try:

        def is_open() -> bool:
            assert process.exit_code is None, log.read_text(encoding="utf-8")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        wait_until(is_open, 10)
        yield Proxy(port, certificate)
    finally:
        process.end()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the users of the proxies can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


StartProxy = Callable[..., Proxy]


@pytest.fixture
def start_proxy(folder: Path, certificate: Path) -> Iterator[StartProxy]:
    """Start a proxy by its name, in front of two services."""
    with contextlib.ExitStack() as started:

        def start_one(name: str, ports: Sequence[int], *changes: tuple[str, str]) -> Proxy:
            port = free_port()
            command = configure(name, folder, port, ports, certificate, *changes)
            return started.enter_context(running(command, port, certificate, folder))

        yield start_one


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest, start_proxy: StartProxy, instances: Instances) -> Proxy:
    """A proxy with the shipped configuration."""
    return start_proxy(request.param, instances.ports)


def outcomes_during(work: Callable[[], None], proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Send requests at a fixed rate while `work` runs in a thread; return the number of each
    outcome.
    """
    monkeypatch.setenv("SSL_CERT_FILE", str(proxy.certificate))
    counts: Counter[str] = Counter()

    async def send(is_streamed: bool, working: asyncio.Task[None]) -> None:
        bodies = [json.dumps({"inputs": SENTENCE, "stream": is_streamed}).encode()]
        load = Load("/v1/generate", bodies, is_streamed, rates=[RATES[is_streamed]], duration_s=SLICE_S)
        async with Client(f"https://localhost:{proxy.port}", TIMEOUT_S) as client:
            while not working.done():
                for outcome in (await run_load(client, load)).outcomes:
                    counts["success" if isinstance(outcome, Success) else str(outcome)] += 1

    async def run() -> None:
        working = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.gather(send(False, working), send(True, working))
        await working

    asyncio.run(run())
    print(  # noqa: T201 - shown by `make test-proxies`
        f"{counts.total()} requests during a rolling restart, {counts.total() - counts['success']} failed: {counts}"
    )
    return counts


def test_a_rolling_restart_loses_no_request(
    proxy: Proxy, instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = outcomes_during(instances.restart_in_turn, proxy, monkeypatch)
    assert counts.keys() == {"success"} and counts["success"] > 500, counts


def test_a_rolling_restart_of_services_with_workers_loses_no_request(
    start: Start, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = start(workers=2)
    counts = outcomes_during(instances.restart_in_turn, start_proxy("nginx", instances.ports), monkeypatch)
    instances.stop_all()
    assert counts.keys() == {"success"} and counts["success"] > 500, counts


def test_without_the_retry_rules_nginx_loses_requests(
    instances: Instances, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of these tests finds a loss."""
    proxy = start_proxy("nginx", instances.ports, (r"proxy_next_upstream .+;", "proxy_next_upstream off;"))
    counts = outcomes_during(instances.restart_in_turn, proxy, monkeypatch)
    assert counts.total() - counts["success"] > 20, counts


@pytest.mark.parametrize("name", PROXIES)
def test_the_tokens_of_a_stream_are_not_buffered(
    serve: Serve, make_backend: MakeBackend, start_proxy: StartProxy, name: str
) -> None:
    with serve(make_backend(step_s=0.05)) as wire:
        proxy = start_proxy(name, (wire.port, wire.port))
        for path, body, end in (
            ("/v1/generate", {"inputs": "x", "stream": True}, b"data: [DONE]\n\n"),
            ("/api/generate", {"model": "fake", "prompt": "x", "stream": True}, b"}\n"),  # not server-sent events
        ):
            status, content, seconds = proxy.request(body, path)
            assert status == 200 and content.endswith(end)
            assert seconds > 0.1  # at least two steps


@pytest.fixture(scope="module")
def small_instances(start: Start) -> Iterator[Instances]:
    """Services that are overloaded by a few requests."""
    instances = start(max_rows=1, max_waiting_sequences=1)
    yield instances
    instances.stop_all()


@pytest.mark.parametrize("name", PROXIES)
def test_an_overloaded_service_gets_each_request_once(
    small_instances: Instances, start_proxy: StartProxy, name: str
) -> None:
    def num_received() -> float:
        return small_instances.metric("sightline_http_requests_total", '{route="/v1/generate"')

    proxy, before = start_proxy(name, small_instances.ports), num_received()
    body = {"inputs": SENTENCE, "parameters": {"min_new_tokens": 60, "max_new_tokens": 60}}
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        statuses = Counter(clients.map(lambda _: proxy.request(body)[0], range(NUM_CALLS)))
    assert statuses.keys() == {200, 429} and num_received() - before == NUM_CALLS, statuses


def test_a_body_above_the_limit_gets_413(proxy: Proxy) -> None:
    for size, status in ((2**20, 422), (2**20 + 1, 413), (2**22, 413)):
        rest = len(json.dumps({"inputs": ""}))
        assert proxy.request({"inputs": "x" * (size - rest)})[0] == status


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", PROXIES)
def test_a_client_that_disconnects_frees_its_rows(
    serve: Serve, make_backend: MakeBackend, start_proxy: StartProxy, name: str, is_streamed: bool
) -> None:
    parameters = {"min_new_tokens": 40, "max_new_tokens": 40}
    body = json.dumps({"inputs": "x", "stream": is_streamed, "parameters": parameters})
    head = f"POST /v1/generate HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    with serve(make_backend(step_s=0.2)) as wire:  # eight seconds in all
        with start_proxy(name, (wire.port, wire.port)).connect() as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: wire.backend.num_busy == 1)
        wait_until(lambda: wire.backend.num_busy == 0, 2)
