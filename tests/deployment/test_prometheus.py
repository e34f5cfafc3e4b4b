"""The dashboard and the alerts in a real Prometheus, which scrapes a service with two workers.

The commands are those of docs/how-to/monitor.md, with free ports and shorter intervals.
"""

import concurrent.futures
import json
import math
import re
import shlex
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml  # type: ignore[import-untyped]

from lab.bench.server import RunningServer, free_port, serving, serving_command
from sightline.service.keys import add_key
from tests.deployment.test_monitoring import DASHBOARD, PANELS, RULES
from tests.e2e.test_documented_commands import Block, has_pattern, read_blocks
from tests.service.conftest import wait_until

pytestmark = pytest.mark.prometheus

CONFIGURATION = Path("deploy/prometheus")
SCRAPE_S = 1.0
WINDOW = "1m"  # in place of $__rate_interval
TIMEOUT_S = 30.0
PATTERNS = {"$job": ".*", "$instance": ".*", "$model": ".*", "$__rate_interval": WINDOW}


@dataclass(frozen=True)
class Monitored:
    """A service with keys, and the Prometheus that scrapes it."""

    service: RunningServer
    prometheus: RunningServer
    key: str

    def post(self, path: str, body: Any) -> int:
        """Send a request and return the status."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.service.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
                return int(response.status)
        except HTTPError as error:
            with error:
                return error.code

    def api(self, path: str, **parameters: str) -> Any:
        """Return the data of a response of Prometheus."""
        url = f"{self.prometheus.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["error"]) from None

    def query(self, expr: str) -> list[float]:
        """Return the finite values of an instant query."""
        values = [float(one["value"][1]) for one in self.api("query", query=expr)["result"]]
        return [value for value in values if math.isfinite(value)]

    def alerts(self) -> dict[str, Any]:
        """Return the firing alerts by name."""
        alerts = self.api("alerts")["alerts"]
        return {one["labels"]["alertname"]: one for one in alerts if one["state"] == "firing"}


def blocks(beginning: str) -> list[Block]:
    """Return the commands of the page that begin with this text."""
    return [one for one in read_blocks(Path("docs/how-to/monitor.md")) if one.code.startswith(beginning)]


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is missing; install Debian's package with `apt-get install prometheus`.")
    return path


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def configure(folder: Path, port: int, key: str) -> None:
    """Copy the configuration for a service with keys on this port, with short times."""
    shutil.copytree(CONFIGURATION, folder)
    (folder / "sightline.key").write_text(key, encoding="utf-8")
    for name, changes in {
        "prometheus.yml": {r"_interval: 15s": f"_interval: {SCRAPE_S:g}s", r"# (?=authorization)": ""},
        "targets.yml": {r"127\.0\.0\.1:8000": f"127.0.0.1:{port}"},
        "alerts.yml": {r"for: \d+m": "for: 1s"},
    }.items():
        text = (folder / name).read_text(encoding="utf-8")
        for pattern, replacement in changes.items():
            text, count = re.subn(pattern, replacement, text)
            assert count, f"{name} has no {pattern}"
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """A service after traffic of all kinds, with its metrics in Prometheus."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("monitored")
    keys = folder / "keys.json"
    admin = add_key(keys, "prometheus", "admin")
    user = add_key(keys, "alice", "use")
    limits = {"workers": 2, "max_rows": 16, "max_waiting_sequences": 32}
    with serving(Path("bundles"), keys=str(keys), default_model="multi30k-en-de", **limits) as service:
        configure(folder / "prometheus", service.port, admin)
        (start,) = blocks("prometheus --config.file")
        port = free_port()
        command = start.code.replace(str(CONFIGURATION), str(folder / "prometheus"))
        command = command.replace("/tmp/sightline-prometheus", str(folder / "data")).replace("9090", str(port))
        words = shlex.split(command.replace("\\\n", ""))
        with serving_command(words, port, "/-/ready", {}, log=folder / "log") as prometheus:
            found = Monitored(service, prometheus, user)
            for times in (1, 2):  # a rate needs two values of a series
                send_traffic(found, times)
            yield found


def send_traffic(monitored: Monitored, times: int) -> None:
    """Send requests of each kind that the dashboard shows, and some that fail; wait until
    Prometheus has counted them. `times` is the number of calls of this function.
    """
    sentence = "Two girls are playing with a small brown dog on the beach."
    prompt = " ".join(["hello, how are you today?"] * 8)
    chat = {"model": "smalltalk-chat-gatt", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
    calls: list[tuple[str, Any]] = [
        ("/v1/generate", {"inputs": sentence}),
        ("/v1/generate", {"inputs": sentence, "stream": True}),
        ("/v1/encode", {"inputs": sentence}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
    ]
    for path, body in calls:
        assert monitored.post(path, body) == 200
    assert monitored.post("/v1/generate", {"inputs": ""}) == 422
    # Each worker admits one of these calls; with another one, there is no place left.
    large = {"inputs": [sentence] * 24, "parameters": {"min_new_tokens": 30, "max_new_tokens": 30}}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: monitored.post("/v1/generate", large), range(8)))
    assert set(statuses) == {200, 429}
    assert monitored.post("/v1/generate", {"inputs": sentence, "model": "nobody"}) == 404
    counter = 'sightline_request_failure_total{code="model_not_found"}'
    wait_until(lambda: monitored.query(counter) == [times], TIMEOUT_S)


def resolved(expr: str) -> str:
    """Return an expression with the variables of the dashboard replaced, as Grafana does it."""
    for name, value in PATTERNS.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


def test_every_query_of_the_dashboard_has_numbers(monitored: Monitored) -> None:
    queries = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    assert len(queries) > 40
    empty = [(title, expr) for title, expr in queries if not monitored.query(resolved(expr))]
    assert not empty


def test_the_variables_of_the_dashboard_have_the_values_of_the_service(monitored: Monitored) -> None:
    values = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            series = monitored.api("series", **{"match[]": resolved(selector)})
            values[variable["name"]] = {one[label] for one in series}
    used_models = {"multi30k-en-de", "smalltalk-chat-gatt"}
    address = f"127.0.0.1:{monitored.service.port}"
    assert values == {"job": {"sightline"}, "instance": {address}, "model": used_models}


def test_the_metrics_are_those_of_both_workers_and_of_the_traffic(monitored: Monitored) -> None:
    assert monitored.query("sightline_workers") == [2]
    assert monitored.query('sightline_limit_reached_total{limit="waiting_sequences"}') > [0]
    assert monitored.query('sum(sightline_key_requests_total{key="alice"})') > [0]
    assert monitored.query("sum(sightline_prefix_cache_hits_total)") > [0]


def test_the_documented_command_shows_the_service(monitored: Monitored) -> None:
    (shown,) = blocks("promtool query")
    code = shown.code.replace("9090", str(monitored.prometheus.port))
    done = subprocess.run(["sh", "-e", "-c", code], capture_output=True, text=True, check=False)
    output = shown.output.replace("8000", str(monitored.service.port))
    assert has_pattern(output.strip(), done.stdout.strip()), done.stdout + done.stderr


def test_the_queries_of_the_autoscalers_count_the_sequences_in_progress(monitored: Monitored) -> None:
    """KEDA asks for the sum of all pods, prometheus-adapter for the number of each pod."""
    components = Path("deploy/kubernetes/components")
    scaled = yaml.safe_load((components / "keda" / "scaled-object.yaml").read_text(encoding="utf-8"))["spec"]
    rules = yaml.safe_load((components / "hpa" / "adapter-rules.yaml").read_text(encoding="utf-8"))["rules"]
    # The labels of Kubernetes are those of a cluster only.
    of_all = scaled["triggers"][0]["metadata"]["query"].replace('namespace="sightline",', "")
    of_each = rules["custom"][0]["metricsQuery"]
    of_each = of_each.replace("<<.GroupBy>>", "instance").replace("<<.LabelMatchers>>", 'job="sightline"')
    body = {"inputs": ["A dog runs."] * 24, "parameters": {"min_new_tokens": 60, "max_new_tokens": 60}}
    done = threading.Event()

    def send_until_done() -> None:
        while not done.is_set():
            monitored.post("/v1/generate", body)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(send_until_done)
        try:
            wait_until(lambda: monitored.query(of_all) > [8], TIMEOUT_S)
            at = str(time.time())
            sums = [
                [float(one["value"][1]) for one in monitored.api("query", query=query, time=at)["result"]]
                for query in (of_all, of_each)
            ]
        finally:
            done.set()
    assert sums[0] == sums[1]
    assert 0 < sums[0][0] <= 2 * 24
    wait_until(lambda: monitored.query(of_all) == [0], TIMEOUT_S)


def test_every_rule_is_evaluated_and_only_true_alerts_fire(monitored: Monitored) -> None:
    (group,) = monitored.api("rules")["groups"]
    wait_until(lambda: all(rule["health"] == "ok" for rule in monitored.api("rules")["groups"][0]["rules"]), TIMEOUT_S)
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in RULES]
    assert set(monitored.alerts()) <= {"SightlineOverloaded"}  # of the traffic


def test_an_alert_fires_when_the_service_stops(monitored: Monitored) -> None:
    """The last test: the service is gone after it."""
    monitored.service.process.end()
    wait_until(lambda: "SightlineDown" in monitored.alerts(), TIMEOUT_S)
    alert = monitored.alerts()["SightlineDown"]
    address = f"127.0.0.1:{monitored.service.port}"
    expected = {"alertname": "SightlineDown", "instance": address, "job": "sightline", "severity": "critical"}
    assert alert["labels"] == expected
    assert alert["annotations"] == {
        "summary": f"Prometheus cannot reach {address}.",
        "runbook": "docs/how-to/runbook.md#sightlinedown",
    }


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    promtool("check", "config", CONFIGURATION / "prometheus.yml")
    promtool("check", "rules", CONFIGURATION / "alerts.yml")


def test_compose_gives_the_containers_files_that_exist_and_ports_of_this_machine_alone() -> None:
    services = yaml.safe_load(Path("docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
        sources = [volume.split(":")[0] for volume in services[name]["volumes"]]
        assert all(Path(source).exists() for source in sources if source.startswith("."))
    (target,) = yaml.safe_load((CONFIGURATION / "targets-compose.yml").read_text(encoding="utf-8"))
    (address,) = target["targets"]
    assert address == "service:8000" and "service" in services


SERVICE = {"job": "sightline", "instance": "a:8000"}
MODEL = {"job": "sightline", "model_name": "toy"}


def series(metric: str, values: str, **labels: str) -> dict[str, str]:
    """Return a time series with one value each minute, in the notation of promtool."""
    all_labels = ",".join(f'{name}="{value}"' for name, value in {**SERVICE, **labels}.items())
    return {"series": f"{metric}{{{all_labels}}}", "values": values}


def failures(code: str, rising: int) -> list[dict[str, str]]:
    """Return the failures per minute with an error code, of 200 calls per minute."""
    return [
        series("sightline_request_failure_total", f"0+{rising}x30", code=code),
        series("sightline_http_requests_total", "0+150x30", route="/v1/generate", status="200"),
        series("sightline_http_requests_total", "0+50x30", route="/v1/encode", status="429"),
    ]


def histogram(name: str, counts: dict[str, int]) -> list[dict[str, str]]:
    """Return a histogram by the upper limits of its buckets, with their counts per minute."""
    return [
        series(f"sightline_{name}_bucket", f"0+{count}x30", model_name="toy", le=limit)
        for limit, count in counts.items()
    ]


@dataclass(frozen=True)
class Example:
    """Series on which an alert fires with this summary, and series on which it does not."""

    summary: str
    faulty: list[dict[str, str]]
    healthy: list[dict[str, str]]
    labels: dict[str, str]


def example(
    summary: str, faulty: list[dict[str, str]], healthy: list[dict[str, str]], labels: dict[str, str] = SERVICE
) -> Example:
    return Example(summary, faulty, healthy, labels)


EXAMPLES = {
    "SightlineDown": example("Prometheus cannot reach a:8000.", [series("up", "0x30")], [series("up", "1x30")]),
    "SightlineRestarting": example(
        "a:8000 or its workers started again and again in the last 15 minutes.",
        [series("sightline_process_start_time_seconds", "0+60x30"), series("sightline_workers", "0x20 1x10")],
        [  # both workers have been replaced
            series("sightline_process_start_time_seconds", "100x20 1300 1360x9"),
            series("sightline_workers", "2x30"),
        ],
    ),
    "SightlineNotReady": example(
        "a:8000 answers Prometheus, but has served no request for 15 minutes.",
        [series("sightline_workers", "0x30")],
        [series("sightline_workers", "0x14 2x15")],
    ),
    "SightlineWorkerLost": example(
        "Workers of a:8000 that failed at their start and are not started again: 1.",
        [series("sightline_workers_failed", "1x30")],
        [series("sightline_workers_failed", "0x30")],
    ),
    "SightlineModelFailed": example(
        "Bundles of a:8000 that failed to load and are not served: 2.",
        [series("sightline_models_failed", "2x30")],
        [series("sightline_models_failed", "0x30")],
    ),
    "SightlineInternalErrors": example(
        "a:8000 answers 500. Search its log for the level error.",
        [series("sightline_request_failure_total", "0x28 1x2", code="internal")],
        [series("sightline_request_failure_total", "7x30", code="internal")],
    ),
    "SightlineModelReloaded": example(
        "a:8000 has ended a step of toy and loaded the model again.",
        [series("sightline_model_reloads_total", "0x28 1x2", model_name="toy")],
        [series("sightline_model_reloads_total", "1x30", model_name="toy")],
        {**SERVICE, **MODEL},
    ),
    "SightlineOverloaded": example(
        "More than 5 % of the calls to a:8000 get 429 overloaded.",
        failures("overloaded", 11),
        failures("overloaded", 9),
    ),
    "SightlineDeadlines": example(
        "More than 1 % of the calls to a:8000 end at their deadline (504).",
        failures("deadline_exceeded", 3),
        failures("deadline_exceeded", 1),
    ),
    "SightlineSlow": example(
        "The 99th percentile of the latency of toy is 9.5s.",
        histogram("e2e_request_latency_seconds", {"5.0": 90, "10.0": 100, "+Inf": 100}),
        histogram("e2e_request_latency_seconds", {"5.0": 100, "10.0": 100, "+Inf": 100}),
        MODEL,
    ),
    "SightlineFirstTokenSlow": example(
        "The 95th percentile of the time to the first token of toy is 1.75s.",
        histogram("time_to_first_token_seconds", {"1.0": 90, "2.5": 100, "+Inf": 100}),
        histogram("time_to_first_token_seconds", {"1.0": 96, "2.5": 100, "+Inf": 100}),
        MODEL,
    ),
    "SightlineQueueing": example(
        "Requests for toy wait 1.75s (95th percentile) in the queue.",
        histogram("request_queue_time_seconds", {"1.0": 90, "2.5": 100, "+Inf": 100}),
        histogram("request_queue_time_seconds", {"1.0": 96, "2.5": 100, "+Inf": 100}),
        MODEL,
    ),
    "SightlineConnectionLimit": example(
        "a:8000 rejected connections or bodies at the limit connections_per_address.",
        [series("sightline_limit_reached_total", "0x28 1x2", limit="connections_per_address")],
        [series("sightline_limit_reached_total", "0+9x30", limit="waiting_sequences")],
        {**SERVICE, "limit": "connections_per_address"},
    ),
    "SightlineDescriptors": example(
        "a:8000 uses 85% of its file descriptors.",
        [series("sightline_process_open_fds", "850x30"), series("sightline_process_max_fds", "1000x30")],
        [series("sightline_process_open_fds", "750x30"), series("sightline_process_max_fds", "1000x30")],
    ),
    "SightlineLogLost": example(
        "a:8000 dropped log lines, because their reader is too slow.",
        [series("sightline_log_lines_dropped_total", "0x28 3x2")],
        [series("sightline_log_lines_dropped_total", "3x30")],
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_fires_on_its_fault_and_on_nothing_else(rule: dict[str, Any], tmp_path: Path) -> None:
    example = EXAMPLES[rule["alert"]]
    firing = {
        "exp_labels": {**example.labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": example.summary},
    }
    faulty = [{"eval_time": "30m", "alertname": rule["alert"], "exp_alerts": [firing]}]
    healthy: list[dict[str, Any]] = [
        {"eval_time": time, "alertname": one["alert"], "exp_alerts": []}
        for time in ("5m", "14m", "30m")
        for one in RULES
    ]
    tests = [
        {"interval": "1m", "input_series": input_series, "alert_rule_test": checks}
        for input_series, checks in ((example.faulty, faulty), (example.healthy, healthy))
    ]
    file = tmp_path / "test.yml"  # JSON is YAML
    rules = str((CONFIGURATION / "alerts.yml").absolute())
    file.write_text(json.dumps({"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}), encoding="utf-8")
    promtool("test", "rules", file)
