"""The service in Ray Serve. Each test starts real clusters on this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from sightline.service.keys import Quota, add_key
from tests.ray.conftest import BIN, SENTENCE, Load, RayService, arguments, free_port, processes, program, wait_for

pytestmark = pytest.mark.ray

WHOLE_AGAIN_S = 20.0
CALL_WITHOUT_TOKEN = """
import grpc, sys
channel = grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}")
try:
    channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=20)
except grpc.RpcError as error:
    print(error.code().name)
"""
LONG = {"min_new_tokens": 120, "max_new_tokens": 120}


def ids_of(service: RayService) -> str:
    """Return a text of the environment of all processes of the service's cluster."""
    return f"RAY_SERVE_HAPROXY_STATS_PORT={service.environment['RAY_SERVE_HAPROXY_STATS_PORT']}\0"


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def listening_addresses(service: RayService) -> dict[str, str]:
    """Return the addresses on which processes of the cluster listen, with their commands."""
    found = {}
    pids = processes("", ids_of(service))
    for line in subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines():
        for pid, command in pids.items():
            if f"pid={pid}," in line:
                found[line.split()[3]] = command
    return found


def open_addresses(service: RayService) -> dict[str, str]:
    """Return those of the addresses that other machines reach."""
    loopback = ("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:")
    return {
        address: command
        for address, command in listening_addresses(service).items()
        if not address.startswith(loopback)
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules
def test_files_of_killed_replicas_and_of_lost_machines_are_removed(tmp_path: Path) -> None:
    from sightline.service.ray_app import MAX_TARGET_AGE_S, TargetFile

    target = TargetFile(tmp_path, "10.0.0.1:8001")
    target.write()
    (own,) = tmp_path.iterdir()
    machine, process = own.stem.rpartition("-")[0], subprocess.Popen(["true"])
    process.wait()
    for name, age in ((f"{machine}-{process.pid}", 0.0), ("lost-1", MAX_TARGET_AGE_S + 1), ("other-1", 60.0)):
        path = tmp_path / f"{name}.json"
        path.write_text("[]", encoding="utf-8")
        os.utime(path, (own.stat().st_mtime - age,) * 2)
    target.write()
    assert {path.stem for path in tmp_path.iterdir()} == {own.stem, "other-1"}
    assert json.loads(own.read_text(encoding="utf-8")) == [{"targets": ["10.0.0.1:8001"]}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_full_disk_of_the_targets_does_not_stop_a_replica(
    small_disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    from sightline.service.ray_app import TargetFile

    disk = small_disk(4)
    (disk / "other").write_bytes(bytes(4096))
    target = TargetFile(disk, "10.0.0.1:8001")
    target.try_write()
    assert "No space left on device" in caplog.text and "Prometheus may miss this replica" in caplog.text
    assert not list(disk.glob("*.json"))
    (disk / "other").unlink()
    target.try_write()
    assert len(list(disk.glob("*.json"))) == 1


def test_two_replicas_serve_like_one_service_and_survive_the_loss_of_one(new_service: RayService, redis: str) -> None:
    service, lines = new_service, list[str]()
    limited_key = add_key(service.targets.parent / "keys.json", "bob", "use", Quota(requests_per_minute=6))
    command = [str(BIN / "sightline"), "serve", *arguments(service, workers=2, drain_s=2, quota_storage=redis)]
    with program(command, service.environment, lines) as process:
        wait_for(lambda: any('"listening"' in line for line in lines), lines)
        wait_for(service.is_ready, lines, 10)
        assert len(service.replicas) == 2
        check_requests(service)
        check_client_that_disconnects(service)
        check_quota(service, limited_key)
        check_ports(service)
        check_killed_replica(service, lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "".join(lines[-40:])
    assert processes("", ids_of(service)) == {}
    assert list(service.targets.iterdir()) == []


@contextlib.contextmanager
def cluster(service: RayService, lines: list[str]) -> Iterator[tuple[str, int]]:
    """Run a cluster without a service; yield its address and the port of its dashboard."""
    gcs, dashboard = free_port(), free_port()
    start = [str(BIN / "ray"), "start", "--head", "--block", f"--port={gcs}", f"--dashboard-port={dashboard}"]
    with program([*start, "--num-cpus=2", "--min-worker-port=0", "--max-worker-port=0"], service.environment, lines):
        wait_for(lambda: any("Ray runtime started" in line for line in lines), lines)
        yield f"127.0.0.1:{gcs}", dashboard


def report(fault: str, num_lost: int, load: Load, whole_s: float) -> None:
    text = f"{num_lost} of {len(load.results)} requests lost, whole again after {whole_s:.1f} s"
    sys.stdout.write(f"{fault}: {text}\n")


def check_ports(service: RayService) -> None:
    """Check that other machines reach only the ports between deployments, which need a token."""
    addresses = open_addresses(service)
    assert len(addresses) == len(service.replicas)
    assert all("ray::ServeReplica" in command for command in addresses.values()), addresses
    for address in addresses:
        code = subprocess.run(
            [sys.executable, "-c", CALL_WITHOUT_TOKEN, address.rpartition(":")[2]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert code.stdout == "UNAUTHENTICATED\n", code.stdout + code.stderr


def check_quota(service: RayService, key: str) -> None:
    """Check that the replicas count the requests of a key together, which may send six a minute."""
    answered = 'sightline_http_requests_total{route="/v1/generate",status="%s"}'
    headers = {"Authorization": f"Bearer {key}"}
    # HAProxy gives them to the replicas in turn.
    responses = [service.request("/v1/generate", {"inputs": SENTENCE}, headers) for _ in range(9)]
    statuses = Counter(status for status, _, _ in responses)
    assert statuses == {200: 6, 429: 3}, statuses
    assert all(int(headers["retry-after"]) <= 60 for status, headers, _ in responses if status == 429)
    assert service.metric(answered % 429) == 3
    pages = [service.metrics(address) or "" for address in service.replicas.values()]
    assert all(answered % 200 in page for page in pages), "one replica has answered all requests"


def check_requests(service: RayService) -> None:
    status, headers, body = service.request("/v1/generate", {"inputs": SENTENCE}, {"X-Request-Id": "own-id"})
    assert status == 200 and json.loads(body)["model"] == "toy-0"
    assert headers.get_all("x-request-id") == ["own-id"]
    assert len(headers.get_all("server") or ()) == 1
    status, headers, body = service.request("/v1/generate", {"input": SENTENCE})
    assert (status, headers.get_all("x-request-id")) == (422, [json.loads(body)["error"]["request_id"]])
    assert service.request("/v1/generate", {"inputs": "x" * 1_100_000})[0] == 413
    assert service.request("/v1/generate", {"inputs": SENTENCE}, {"Authorization": ""})[0] == 401
    for _ in range(4):  # whichever replica answers
        assert service.request("/metrics", headers={"Authorization": f"Bearer {service.admin_key}"})[0] == 404
    # A stream takes 15 ms. If the machine pauses, tokens wait for each other, but not in every
    # stream.
    parts = max((stream(service) for _ in range(5)), key=len)
    assert len(parts) > 20, "the tokens do not arrive as they are generated"


def stream(service: RayService) -> list[float]:
    """Return the times at which the parts of a stream arrive, after the request in seconds."""
    connection, started = service.connect(), time.monotonic()
    body = json.dumps({"inputs": SENTENCE, "stream": True, "parameters": LONG})
    headers = {"Authorization": f"Bearer {service.key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/generate", body, headers)
    response, parts = connection.getresponse(), []
    while response.read1():
        parts.append(time.monotonic() - started)
    connection.close()
    return parts


def check_client_that_disconnects(service: RayService) -> None:
    gone = 'sightline_request_failure_total{code="client_closed_request"'  # of any model
    for num_gone, is_stream in enumerate((False, True), start=1):
        parameters = LONG if is_stream else {**LONG, "num_beams": 8}
        body = json.dumps({"inputs": [SENTENCE] * 64, "stream": is_stream, "parameters": parameters})
        with contextlib.closing(service.connect()) as connection:
            connection.putrequest("POST", "/v1/generate")
            for name, value in (("Authorization", f"Bearer {service.key}"), ("Content-Type", "application/json")):
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            time.sleep(0.05)  # HAProxy treats a body that arrives later differently
            connection.send(body.encode())
            if is_stream:
                connection.getresponse().read1()
            else:
                wait_for(lambda: service.metric("sightline_num_requests_running") > 0, ["no row runs"], 5)
        wait_for(lambda: service.metric("sightline_num_requests_") == 0, ["the rows are not freed"], 3)
        assert service.metric(gone) == num_gone, is_stream


def check_killed_replica(service: RayService, lines: list[str]) -> None:
    killed = min(service.replicas)
    with service.under_load() as load:
        time.sleep(2)
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: has_ended(killed), lines, 5)
        ended = time.monotonic()
        wait_for(lambda: len(service.replicas) == 2 and killed not in service.replicas, lines, WHOLE_AGAIN_S)
        whole_s = time.monotonic() - ended
        time.sleep(2)
    assert set(load.count(since=ended)) == {200}, load.count(since=ended)
    lost = load.count().total() - load.count()[200]
    report("killed replica", lost, load, whole_s)
    assert lost <= 8, load.count()  # at most those of each client that were in flight
    counts = [service.metrics(address) or "" for address in service.replicas.values()]
    assert all('sightline_http_requests_total{route="/v1/generate",status="200"}' in page for page in counts)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_redeployment_loses_no_request_and_serve_shutdown_leaves_nothing(
    new_service: RayService, num_replicas: int
) -> None:
    service, lines = new_service, list[str]()
    with cluster(service, lines) as (address, dashboard):
        assert listening_addresses(service) and not open_addresses(service)

        def deploy(**settings: Any) -> None:
            given = arguments(service, address=address, workers=num_replicas, **settings)
            command = [str(BIN / "sightline"), "serve", *given]
            done = subprocess.run(
                command, env=dict(service.environment), capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr

        deploy()
        wait_for(service.is_ready, lines, 10)
        before = service.replicas
        with service.under_load() as load:
            time.sleep(1)
            deploy(max_inputs=7)
            time.sleep(2)
        assert set(load.count()) == {200}, load.count()
        assert load.count().total() > 50
        assert not before.keys() & service.replicas.keys()
        assert service.request("/v1/generate", {"inputs": [SENTENCE] * 8})[0] == 422
        shutdown = [str(BIN / "serve"), "shutdown", "-y", "--address", f"http://127.0.0.1:{dashboard}"]
        subprocess.run(shutdown, env=dict(service.environment), timeout=60, check=True)
        wait_for(lambda: not processes("Serve|Proxy|haproxy", ids_of(service)), lines, 40)
        assert list(service.targets.iterdir()) == []


def test_replicas_follow_the_load(new_service: RayService, tmp_path: Path) -> None:
    """The committed configuration, with short delays, scales from one replica to two and back."""
    service, lines = new_service, list[str]()
    config = yaml.safe_load(Path("deploy/ray/serve.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = service.port
    (application,) = config["applications"]
    application["args"] = {
        "bundles": str(tmp_path / "bundles"),
        "default_model": "toy-0",
        "keys": str(tmp_path / "keys.json"),
        "metrics_targets": str(service.targets),
    }
    (deployment,) = application["deployments"]
    deployment["autoscaling_config"] |= {"downscale_delay_s": 3}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        address, _ = stack.enter_context(cluster(service, lines))
        command = [str(BIN / "serve"), "run", "--address", address, str(path)]
        process = stack.enter_context(program(command, service.environment, lines))
        wait_for(service.is_ready, lines)
        assert len(service.replicas) == 1
        with service.under_load(clients=32, new_tokens=100) as load:
            wait_for(lambda: len(service.replicas) == 2, lines, 60)
            time.sleep(2)
        assert set(load.count()) == {200}, load.count()
        wait_for(lambda: len(service.replicas) == 1, lines, 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def test_a_lost_node_is_noticed_and_replaced(new_service: RayService) -> None:
    service, lines = new_service, list[str]()
    command = [sys.executable, "-m", "tests.ray.two_nodes", *arguments(service, workers=2, drain_s=2)[1:]]
    with program(command, service.environment, lines) as process:
        assert process.stdin is not None
        wait_for(lambda: "ready\n" in lines, lines)
        before = service.replicas
        assert len(before) == 2
        with service.under_load() as load:
            time.sleep(2)
            process.stdin.write("lose a node\n")
            process.stdin.flush()
            wait_for(lambda: any(map(has_ended, before)), lines, 30)
            lost_at = time.monotonic()
            wait_for(lambda: len(service.replicas) == 2 and service.replicas != before, lines, WHOLE_AGAIN_S)
            whole_s = time.monotonic() - lost_at
            time.sleep(2)
        late = [(status, round(started - lost_at, 3)) for status, started in load.results if status != 200]
        report("lost node", len(late), load, whole_s)
        assert all(seconds < 0 for _, seconds in late) and len(late) <= 8, late


def test_settings_that_ray_does_not_support_are_rejected(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    add_key(keys, "bob", "use", Quota(requests_per_minute=1))
    for flags, message in (
        (["--keys", str(keys)], "SIGHTLINE_QUOTA_STORAGE"),
        (["--model-control", "explicit"], "SIGHTLINE_MODEL_CONTROL"),
        (["--admin-address", "127.0.0.1:9"], "SIGHTLINE_ADMIN_ADDRESS"),
    ):
        command = [str(BIN / "sightline"), "serve", "--ray", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, message in done.stderr) == (2, True), done.stdout + done.stderr
