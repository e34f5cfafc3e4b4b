"""Tests that build the images and start, use and stop the stack. They need a Docker engine and
docker-compose.
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml  # type: ignore[import-untyped]

from lab.bench.engine.memory import mixed_calls, send_all
from lab.bench.load import with_client
from lab.bench.server import free_port
from sightline import __version__
from sightline.service.discovery import find_bundles

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[2]
COMPOSE = shlex.split(os.environ.get("COMPOSE", "")) or (
    ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
)
GRACE_S = 45  # stop_grace_period in docker-compose.yml


@dataclass(frozen=True)
class Stack:
    """A compose project with a unique name, separate from any other."""

    project: str
    port: int
    files: Sequence[Path] = (Path("docker-compose.yml"),)
    variables: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str) -> str:
        files = [word for file in self.files for word in ("--file", str(file))]
        variables = {"SERVICE_PORT": str(self.port), **self.variables}
        return run([*COMPOSE, *files, "--project-name", self.project, *arguments], variables)

    def inspect(self, template: str) -> str:
        container = self.compose("ps", "--all", "--quiet", "service").strip()
        return run(["docker", "inspect", "--format", template, container]).strip()

    def python(self, code: str) -> str:
        return self.compose("exec", "-T", "service", "python", "-c", code).strip()

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + 60
        while (status := self.inspect("{{.State.Health.Status}}")) != "healthy":
            assert time.monotonic() < deadline, f"{status}\n{self.compose('logs', 'service')}"
            time.sleep(0.5)

    def post(self, path: str, body: object) -> object:
        headers = {"Content-Type": "application/json"}
        request = Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=30) as response:
            return json.load(response)


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    response = subprocess.run(
        command, cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, check=False
    )
    assert response.returncode == 0, f"{command}: {response.returncode}\n{response.stdout}\n{response.stderr}"
    return response.stdout


def logs_of(container: str) -> str:
    logged = subprocess.run(["docker", "logs", container], capture_output=True, text=True, check=True)
    return logged.stdout + logged.stderr


@contextlib.contextmanager
def started(name: str, **variables: str) -> Iterator[Stack]:
    stack = Stack(f"sightline-{name}-{os.getpid()}", free_port(), variables=variables)
    try:
        stack.compose("up", "--build", "--detach")
        stack.wait_until_healthy()
        yield stack
    finally:
        stack.compose("--profile", "loadtest", "down", "--volumes")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with started("test") as stack:
        stack.compose("--profile", "loadtest", "build", "loadtest")  # `run` would use an image that is there
        yield stack


def test_every_shipped_model_is_served_with_the_documented_memory_and_one_processor(sentences: list[str]) -> None:
    """Regression: the service was killed for memory while it loaded its models."""
    with started("small", SERVICE_CPUS="1", SERVICE_MEMORY="512m") as stack:
        manifests = list(find_bundles(ROOT / "bundles").values())
        calls = list(itertools.islice(mixed_calls(manifests, sentences), 1000))
        with_client(f"http://127.0.0.1:{stack.port}", lambda client: send_all(client, calls))
        state = stack.inspect("{{.State.Status}} {{.RestartCount}} {{.State.OOMKilled}} {{.HostConfig.Memory}}")
    assert state == f"running 0 false {512 * 1024 * 1024}"


def test_the_gpu_service_is_hardened_and_never_falls_back_to_the_cpu() -> None:
    services = yaml.safe_load(run([*COMPOSE, "--profile", "gpu", "config"]))["services"]
    service, gpu = services["service"], services["service-gpu"]
    for key in ("cap_drop", "init", "read_only", "security_opt", "stop_grace_period", "tmpfs"):
        assert gpu[key] == service[key]
    assert gpu["profiles"] == ["gpu"] and "profiles" not in service
    assert gpu["environment"] == {"SIGHTLINE_PROVIDER": "cuda"}
    assert gpu["build"]["args"]["RUNTIME"] == "gpu"
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_the_stack_translates(stack: Stack) -> None:
    response = stack.post("/v1/generate", {"inputs": "Two girls are playing with a small brown dog on the beach."})
    assert isinstance(response, dict)
    assert response["outputs"][0]["finish_reason"] == "eos"
    assert "Hund" in response["outputs"][0]["text"]


def test_the_port_is_bound_to_this_machine_alone(stack: Stack) -> None:
    assert stack.compose("port", "service", "8000").strip() == f"127.0.0.1:{stack.port}"


def test_the_service_has_no_privilege(stack: Stack) -> None:
    status = dict(line.split(":\t", 1) for line in stack.python("print(open('/proc/1/status').read())").splitlines())
    assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"


def test_only_tmp_is_writable(stack: Stack) -> None:
    code = "import os; print(os.access('/app', os.W_OK), os.access('/', os.W_OK), os.access('/tmp', os.W_OK))"
    assert stack.python(code) == "False False True"
    assert stack.inspect("{{.HostConfig.ReadonlyRootfs}}") == "true"


@pytest.mark.parametrize("package", ["torch", "transformers", "sightline.lab", "pytest"])
def test_packages_for_training_and_tests_are_not_in_the_image(stack: Stack, package: str) -> None:
    code = f"from importlib.util import find_spec as f; print(*map(bool, map(f, ['sightline.service', {package!r}])))"
    assert stack.python(code) == "True False"


def test_every_line_of_the_log_is_json(stack: Stack) -> None:
    """Regression: ONNX Runtime's telemetry writes a warning in another format if it is enabled."""
    lines = logs_of(stack.compose("ps", "--all", "--quiet", "service").strip()).splitlines()
    assert lines
    assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize("arguments", [(), ("--stream",), ("--endpoint", "encode"), ("--endpoint", "attention")])
def test_the_load_test_runs_inside_the_network_without_a_failure(stack: Stack, arguments: tuple[str, ...]) -> None:
    load = ("--clients", "4", "--requests", "40", *arguments)
    table = stack.compose("--profile", "loadtest", "run", "--rm", "-T", "loadtest", *load)
    assert "40 sent" in table
    assert ": 40 succeeded, 0 rejected, 0 failed" in table


def test_a_stop_is_clean_and_shorter_than_its_grace_period(stack: Stack) -> None:
    started = time.monotonic()
    stack.compose("stop", "service")
    took_s = time.monotonic() - started
    state = stack.inspect("{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}")
    stack.compose("start", "service")
    stack.wait_until_healthy()
    assert state == "exited 0 false"
    assert took_s < GRACE_S - 5


def test_a_stop_before_the_service_handles_signals_is_immediate(stack: Stack) -> None:
    """Regression: as process 1, Python without a handler ignored SIGTERM for 45 s."""
    stack.compose("stop", "service")
    stack.compose("start", "service")
    started = time.monotonic()
    stack.compose("stop", "service")
    took_s = time.monotonic() - started
    exit_code = stack.inspect("{{.State.ExitCode}}")
    stack.compose("start", "service")
    stack.wait_until_healthy()
    assert exit_code in ("0", "143")
    assert took_s < GRACE_S / 2


@pytest.mark.parametrize(
    ("environment", "bundles", "exit_code", "reason"),
    [
        ({"SIGHTLINE_MAX_ROWS": "-1"}, "bundles", 2, "SIGHTLINE_MAX_ROWS"),
        ({}, "docs", 2, "no folder in /bundles has a manifest.json. There are three ways to get a model"),
        ({"SIGHTLINE_DEFAULT_MODEL": "absent"}, "bundles", 3, "the default model absent is not in /bundles"),
    ],
    ids=["wrong setting", "no bundle", "absent default model"],
)
def test_a_service_that_cannot_start_stops_after_five_restarts_and_logs_the_reason(
    stack: Stack, tmp_path: Path, environment: dict[str, str], bundles: str, exit_code: int, reason: str
) -> None:
    """Use the image that `stack` has built."""
    file = tmp_path / "override.yml"
    content = {"services": {"service": {"environment": environment}}}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    files = (*stack.files, file)
    variables = {"SERVICE_BUNDLES": f"./{bundles}", "SERVICE_CPUS": "1"}  # of several workers, each logs the reason
    broken = Stack(f"{stack.project}-broken", free_port(), files, variables)
    try:
        broken.compose("up", "--detach", "--no-build", "service")
        deadline = time.monotonic() + 120
        state = ""
        while not state.startswith("exited "):  # the status is "restarting" between two attempts
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
            state = broken.inspect("{{.State.Status}} {{.State.ExitCode}} {{.RestartCount}}")
        assert state == f"exited {exit_code} 5"
        lines = logs_of(broken.compose("ps", "--all", "--quiet", "service").strip()).splitlines()
        assert len([line for line in lines if reason in line]) == 6
        assert bundles == "docs" or len([line for line in lines if "starting again will not help" in line]) == 6
    finally:
        broken.compose("down", "--volumes")


def test_the_image_has_a_version_tag_and_labels(stack: Stack) -> None:
    assert stack.inspect("{{.Config.Image}}") == f"sightline:{__version__}"
    labels = json.loads(stack.inspect("{{json .Config.Labels}}"))
    assert labels["org.opencontainers.image.title"] == "Sightline"
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_image_holds_no_models_and_imports_them_into_a_volume(stack: Stack) -> None:
    """The licence of the image is that of the code alone. The import needs the package index."""
    image, volume = stack.inspect("{{.Image}}"), f"{stack.project}-models"
    listing = run(["docker", "run", "--rm", "--entrypoint", "find", image, "/app", "/bundles", "-name", "*.onnx"])
    assert listing == ""
    name = f"{stack.project}-imports"
    start = [
        "docker",
        "run",
        "--detach",
        "--name",
        name,
        "--read-only",
        "--tmpfs",
        "/tmp:size=16m",
        "--cap-drop",
        "ALL",
    ]
    try:
        for is_first in (True, False):
            run([*start, "--volume", f"{volume}:/bundles", image, "minilm"])
            deadline = time.monotonic() + 300
            while '"message":"serving"' not in (logged := logs_of(name)):
                assert time.monotonic() < deadline and run(["docker", "ps", "--quiet", "--filter", f"name={name}"]), (
                    logged
                )
                time.sleep(0.5)
            assert ("importing minilm to /bundles/minilm" in logged) is is_first
            run(["docker", "rm", "--force", name])
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)
        run(["docker", "volume", "rm", volume])
