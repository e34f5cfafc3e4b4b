"""Alerts with their runbook, and the Grafana dashboard: the source of their files.

`python -m docs.generate` writes `deploy/prometheus/alerts.yml`, the same rules for Kubernetes,
`deploy/grafana/sightline.json` and the entries of `docs/how-to/runbook.md`. `make test-prometheus`
runs all expressions in a Prometheus server.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from sightline.service.metrics import PREFIX, Metrics

WIDTH = 100
RUNBOOK = "docs/how-to/runbook.md"
GENERATED = "# Prometheus alert rules for Sightline; generated from docs/monitoring.py by `python -m docs.generate`.\n"


@dataclass(frozen=True)
class Alert:
    """An alert rule and its entry in the runbook. Texts are Markdown."""

    name: str
    severity: Literal["critical", "warning"]
    expr: str
    duration: str  # time for which the expression must hold
    summary: str  # template of Prometheus
    meaning: str
    confirm: str
    steps: tuple[str, ...]
    silence: str


ALERTS = (
    Alert(
        name="SightlineDown",
        severity="critical",
        expr='up{job="sightline"} == 0',
        duration="1m",
        summary="Prometheus cannot reach {{ $labels.instance }}.",
        meaning="The service has ended, does not answer in time, or refuses the key of Prometheus.",
        confirm="`curl -i http://HOST:PORT/health/live` on the host of Prometheus. If it answers 200, "
        "`/api/v1/targets` of Prometheus shows the error of the scrape.",
        steps=(
            "No connection: read the last line of level `error` in the log and the [exit code](operate.md#exit-codes). "
            "Codes 2 and 3 need a change of the settings or the bundles, code 137 more memory.",
            "401 or 403 in `/api/v1/targets`: give Prometheus a [key](operate.md#api-keys) with the role `admin`.",
            "421: add the name by which Prometheus reaches the service to `SIGHTLINE_ALLOWED_HOSTS`.",
            "A timeout, while `/health/live` answers: the processors are busy with other work. Look at their load "
            "before you restart anything.",
        ),
        silence="for `instance` during a planned stop. A restart that takes less than a minute does not fire.",
    ),
    Alert(
        name="SightlineRestarting",
        severity="critical",
        expr="changes(sightline_process_start_time_seconds[15m]) > 1 + max_over_time(sightline_workers[15m])",
        duration="0m",
        summary="{{ $labels.instance }} or its workers started again and again in the last 15 minutes.",
        meaning="A process ends soon after its start, more often than a replacement of all workers (SIGHUP) explains.",
        confirm="Search the log for `ended` and its `exit_code`, and for `worker N has ended`.",
        steps=(
            "Exit code 137 or SIGKILL: the memory limit. Compare `sightline_process_resident_memory_bytes` with "
            "it, and lower `SIGHTLINE_MAX_STATE_BYTES`, `SIGHTLINE_MAX_PREFIX_CACHE_BYTES` or `SIGHTLINE_WORKERS` "
            "([Tune](tune.md#memory)).",
            "Exit code 1: the engine failed or hung. The lines of level `error` before it name the model and the cause "
            "([Failures](operate.md#failures)). If one model causes it, take its bundle out of the folder.",
            "A liveness probe that restarts a busy service: give it a longer timeout.",
        ),
        silence="while you restart the service repeatedly on purpose.",
    ),
    Alert(
        name="SightlineNotReady",
        severity="critical",
        expr="sightline_workers == 0",
        duration="15m",
        summary="{{ $labels.instance }} answers Prometheus, but has served no request for 15 minutes.",
        meaning="The models are still being loaded, or the service drains and does not end.",
        confirm="`GET /health/ready` answers 503 and names the state.",
        steps=(
            "`loading`: the log names each bundle when it is loaded. Each stage of a bundle may take "
            "`SIGHTLINE_LOAD_TIMEOUT_S`. Slow disks are the usual cause: the service reads all files to compare "
            "their SHA-256.",
            "Name large models in `SIGHTLINE_LAZY_MODELS`, so that the service is ready before they are loaded.",
            "`draining`: a request holds the process longer than `SIGHTLINE_SHUTDOWN_TIMEOUT_S`. A second SIGTERM ends "
            "it at once.",
        ),
        silence="for `instance` while a service with many large bundles starts for the first time.",
    ),
    Alert(
        name="SightlineWorkerLost",
        severity="warning",
        expr="sightline_workers_failed > 0",
        duration="0m",
        summary="Workers of {{ $labels.instance }} that failed at their start and are not started again: {{ $value }}.",
        meaning="A worker ended three times in a row while it started, and the supervisor has given it up. The other "
        "workers serve, with less throughput and smaller limits.",
        confirm="The log has `worker N has ended at its start 3 times in a row` with the reason.",
        steps=(
            "Repair the reason. It is usually a bundle that has changed in the served folder, or too little memory.",
            "Send SIGHUP (`systemctl reload sightline`). It replaces all workers without a failed request, and also "
            "starts those that were given up.",
        ),
        silence="no longer than the repair takes; nothing else restarts the worker.",
    ),
    Alert(
        name="SightlineModelFailed",
        severity="warning",
        expr="sightline_models_failed > 0",
        duration="0m",
        summary="Bundles of {{ $labels.instance }} that failed to load and are not served: {{ $value }}.",
        meaning="Bundles were left out at the start. Requests for their models get 404 `model_not_found`.",
        confirm="`failed_models` in `GET /health/ready` names the folders, and a log line of level `error` the reason "
        "of each.",
        steps=(
            "A difference of a SHA-256: copy or export the bundle again, and never write into a folder that is served.",
            "A schema version that does not match: export the checkpoint again ([Upgrade](operate.md#upgrade)).",
            "Restart the service, or send SIGHUP if it has several workers. To refuse such a start altogether, set "
            "`SIGHTLINE_STRICT_LOADING=true`.",
        ),
        silence="for `instance` if the bundle will be repaired later; the alert stays until the next start.",
    ),
    Alert(
        name="SightlineInternalErrors",
        severity="warning",
        expr='sum by (job, instance) (increase(sightline_request_failure_total{code="internal"}[5m])) > 0',
        duration="1m",
        summary="{{ $labels.instance }} answers 500. Search its log for the level error.",
        meaning="Calls fail because of the service, not of the client: a graph failed, results were not finite, a lazy "
        "model could not be loaded, or the code has a bug.",
        confirm='`sum by (route) (increase(sightline_http_requests_total{status="500"}[15m]))` shows the routes.',
        steps=(
            "Search the log for lines with `code` `internal`. The line of level `error` before each has the same "
            "`request_id` and the cause.",
            "If all belong to one model, serve its former bundle, and compare the new one with its checkpoint "
            "(`sightline verify`).",
            "After eight failed calls of one graph in a row the service checks itself and ends if the graph is broken; "
            "the supervisor or systemd starts it again.",
        ),
        silence="only for a known cause, with the time of its repair.",
    ),
    Alert(
        name="SightlineModelReloaded",
        severity="warning",
        expr="increase(sightline_model_reloads_total[15m]) > 0",
        duration="0m",
        summary="{{ $labels.instance }} has ended a step of {{ $labels.model_name }} and loaded the model again.",
        meaning="A run of one of the model's graphs took longer than `SIGHTLINE_REQUEST_TIMEOUT_S`, so that no request "
        "could wait for it any longer. All requests of the model in progress failed, and new ones got 503 `loading` "
        "until the model was back.",
        confirm="The log has `a step of MODEL did not end by itself` with the time.",
        steps=(
            "Look for the requests in progress at that time: a graph with a loop may run without end on one of their "
            "inputs. Send them again to a test instance.",
            "If the machine stood still (a suspended virtual machine, a disk that swaps), nothing needs to be done.",
            "If it happens again, serve the former bundle of the model.",
        ),
        silence="only while the input is investigated.",
    ),
    Alert(
        name="SightlineOverloaded",
        severity="critical",
        expr='sum by (job, instance) (rate(sightline_request_failure_total{code="overloaded"}[5m]))\n'
        "  > 0.05 * sum by (job, instance) (rate(sightline_http_requests_total[5m]))",
        duration="5m",
        summary="More than 5 % of the calls to {{ $labels.instance }} get 429 overloaded.",
        meaning="The service gets more work than it can do in time and rejects the rest at once "
        "([Overload](operate.md#overload)). Admitted calls are not affected.",
        confirm="`sum by (limit) (rate(sightline_limit_reached_total[5m]))` shows the limits that reject calls.",
        steps=(
            "`queue_time` or `deadline`: the processors are the limit. Add services, or lower the number of beams, "
            "tokens and maps that clients ask for. A longer `SIGHTLINE_QUEUE_TIMEOUT_S` only moves the wait.",
            "`waiting_sequences`, `waiting_bytes` or `waiting_tokens`: raise `SIGHTLINE_MAX_WAITING_SEQUENCES`, "
            "`SIGHTLINE_MAX_WAITING_BYTES` or `SIGHTLINE_MAX_WAITING_TOKENS` if clients can wait, or let them send "
            "smaller calls.",
            "`response_bytes`: large attention maps or slow readers. Raise `SIGHTLINE_MAX_RESPONSE_BYTES`, or let "
            "clients select layers and heads.",
            "With [API keys](operate.md#api-keys), `sum by (key) (rate(sightline_key_requests_total[5m]))` names the "
            "client.",
        ),
        silence="for `instance` during a load test.",
    ),
    Alert(
        name="SightlineDeadlines",
        severity="warning",
        expr='sum by (job, instance) (rate(sightline_request_failure_total{code="deadline_exceeded"}[5m]))\n'
        "  > 0.01 * sum by (job, instance) (rate(sightline_http_requests_total[5m]))",
        duration="5m",
        summary="More than 1 % of the calls to {{ $labels.instance }} end at their deadline (504).",
        meaning="Calls were admitted and then took longer than `SIGHTLINE_REQUEST_TIMEOUT_S` or their header "
        "`X-Request-Timeout-Ms`: the estimates of admission were too low, or the machine became slower.",
        confirm="`queue_ms`, `encode_ms` and `decode_ms` in the log lines of these calls show where the time went.",
        steps=(
            "If `sightline_engine_step_seconds` has risen, other processes use the processors, or a CPU quota is "
            "throttled (`nr_throttled` in `cpu.stat` of its control group).",
            "If only long outputs are affected, lower `max_new_tokens` in the clients, or raise "
            "`SIGHTLINE_REQUEST_TIMEOUT_S` together with the timeouts of proxies.",
        ),
        silence="for `instance` if one client sets a timeout that cannot be met.",
    ),
    Alert(
        name="SightlineSlow",
        severity="warning",
        expr="histogram_quantile(\n"
        "  0.99, sum by (job, le, model_name) (rate(sightline_e2e_request_latency_seconds_bucket[5m]))\n"
        ") > 5",
        duration="10m",
        summary="The 99th percentile of the latency of {{ $labels.model_name }} is {{ $value | humanizeDuration }}.",
        meaning="One call of a hundred takes longer than 5 seconds. Long outputs do that without any fault; set the "
        "threshold by your load.",
        confirm="The row Latency of the [dashboard](monitor.md#the-dashboard) shows the share of queue, prefill and "
        "decoder.",
        steps=(
            "Queue: see [SightlineQueueing](#sightlinequeueing).",
            "Decoder: more running rows make each step slower. Lower `SIGHTLINE_MAX_ROWS` for latency, or quantize "
            "the model ([Tune](tune.md)).",
            "Prefill: long prompts. Look at the hit rate of the [prefix cache](operate.md#prefix-cache).",
        ),
        silence="for `model_name` if its outputs are long on purpose.",
    ),
    Alert(
        name="SightlineFirstTokenSlow",
        severity="warning",
        expr="histogram_quantile(\n"
        "  0.95, sum by (job, le, model_name) (rate(sightline_time_to_first_token_seconds_bucket[5m]))\n"
        ") > 1",
        duration="10m",
        summary="The 95th percentile of the time to the first token of {{ $labels.model_name }} is "
        "{{ $value | humanizeDuration }}.",
        meaning="Users of streams wait longer than a second before anything appears.",
        confirm="Compare `sightline_request_queue_time_seconds` with `sightline_request_prefill_time_seconds` on the "
        "dashboard.",
        steps=(
            "Queue: see [SightlineQueueing](#sightlinequeueing).",
            "Prefill, and prompts that begin alike: enlarge the [prefix cache](operate.md#prefix-cache) "
            "(`SIGHTLINE_MAX_PREFIX_CACHE_BYTES`), and let a conversation reach the same service each time.",
            "Prefill of long prompts that differ: only a smaller or quantized model, or more processors, help.",
        ),
        silence="for `model_name` if its prompts are long on purpose.",
    ),
    Alert(
        name="SightlineQueueing",
        severity="warning",
        expr="histogram_quantile(\n"
        "  0.95, sum by (job, le, model_name) (rate(sightline_request_queue_time_seconds_bucket[5m]))\n"
        ") > 1",
        duration="10m",
        summary="Requests for {{ $labels.model_name }} wait {{ $value | humanizeDuration }} (95th percentile) in the "
        "queue.",
        meaning="Requests arrive faster than they are served. Above `SIGHTLINE_QUEUE_TIMEOUT_S` they are rejected.",
        confirm="`sightline_num_requests_waiting` stays above 0, and `sightline_num_requests_running` is at "
        '`sightline_limit{setting="max_rows"}`.',
        steps=(
            "Add services behind the proxy, or raise the target of the autoscaler.",
            "If memory is left, raise `SIGHTLINE_MAX_ROWS`: more rows in a step raise throughput until the processors "
            "are saturated ([Tune](tune.md)).",
            "If one client sends large batches, let it send fewer at once; calls take turns, but share the rows.",
        ),
        silence="for `model_name` during batch jobs that may wait.",
    ),
    Alert(
        name="SightlineConnectionLimit",
        severity="warning",
        expr="sum by (job, instance, limit) (\n"
        '  increase(sightline_limit_reached_total{limit=~"connections.*|descriptors|body_bytes"}[5m])\n'
        ") > 0",
        duration="0m",
        summary="{{ $labels.instance }} rejected connections or bodies at the limit {{ $labels.limit }}.",
        meaning="Connections or bodies were rejected before a request was read. Rejected connections have no line "
        "in the access log.",
        confirm="`ss -tn state established '( sport = :PORT )'` on the host, grouped by address, shows the clients. "
        "`sightline_connections` is their number.",
        steps=(
            "`connections_per_address`: one client, or a proxy that counts as one. Raise "
            "`SIGHTLINE_MAX_CONNECTIONS_PER_ADDRESS` for a proxy; let other clients reuse their connections.",
            "`connections`: raise `SIGHTLINE_MAX_CONNECTIONS`, with LimitNOFILE of the unit above it.",
            "`descriptors`: see [SightlineDescriptors](#sightlinedescriptors).",
            "`body_bytes`: bodies that stall while they arrive. Let the proxy buffer requests, or raise "
            "`SIGHTLINE_MAX_WAITING_BYTES`.",
        ),
        silence="for `instance` and `limit` if a known client tries again without harm.",
    ),
    Alert(
        name="SightlineDescriptors",
        severity="warning",
        expr="sightline_process_open_fds / sightline_process_max_fds > 0.8",
        duration="5m",
        summary="{{ $labels.instance }} uses {{ $value | humanizePercentage }} of its file descriptors.",
        meaning="Near the limit, new connections are rejected. With several workers, the value is that of the worker "
        "with the most descriptors.",
        confirm="`ls /proc/PID/fd | wc -l` of each process. Nearly all are connections.",
        steps=(
            "Raise the limit: LimitNOFILE in the unit, `ulimits` in Compose, `ulimit -n` in a shell. The next start "
            "uses it.",
            "Lower `SIGHTLINE_KEEP_ALIVE_S` if most connections are idle.",
            "If `sightline_connections` is far below the number of descriptors, descriptors leak: report it with the "
            "output of `ls -l /proc/PID/fd`, and restart the service.",
        ),
        silence="for `instance` until the restart with the new limit.",
    ),
    Alert(
        name="SightlineLogLost",
        severity="warning",
        expr="increase(sightline_log_lines_dropped_total[5m]) > 0",
        duration="0m",
        summary="{{ $labels.instance }} dropped log lines, because their reader is too slow.",
        meaning="More than 4,096 lines waited for the reader of standard output, so later ones were dropped. Requests "
        "are not affected.",
        confirm="`rate(sightline_log_lines_dropped_total[5m])` shows whether it goes on.",
        steps=(
            "Find the reader: journald (see its `RateLimitBurst`), the log driver of Docker, or a pipe that nobody "
            "reads.",
            "With many small requests, set `SIGHTLINE_LOG_LEVEL=warning`: one line for each request disappears.",
        ),
        silence="for `instance` if the lost lines do not matter.",
    ),
)


def alerts_file() -> str:
    """Return the alert rules in the format of Prometheus."""
    return f"{GENERATED}{_alert_groups()}"


def alerts_resource() -> str:
    """Return the alert rules as a resource of the Prometheus Operator."""
    head = (
        "apiVersion: monitoring.coreos.com/v1\n"
        "kind: PrometheusRule\n"
        "metadata:\n"
        "  name: sightline\n"
        "  labels: {app.kubernetes.io/name: sightline}\n"
        "spec:\n"
    )
    return f"{GENERATED}{head}{textwrap.indent(_alert_groups(), '  ')}"


def _alert_groups() -> str:
    lines = [
        "groups:",
        "  - name: sightline",
        "    rules:",
    ]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            "        expr: |",
            textwrap.indent(alert.expr, " " * 10),
            f"        for: {alert.duration}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook: {RUNBOOK}#{alert.name.lower()}",
        ]
    return "\n".join(lines) + "\n"


def runbook_sections() -> str:
    """Return one section of the runbook for each alert."""
    return "\n\n".join("\n\n".join(_runbook_entry(alert)) for alert in ALERTS)


def _runbook_entry(alert: Alert) -> Iterator[str]:
    yield f"## {alert.name}"
    time = "at once" if alert.duration == "0m" else f"after {alert.duration}"
    yield f"Severity {alert.severity}, fires {time}:"
    yield f"```text\n{alert.expr}\n```"
    yield _fill(f"**Meaning.** {alert.meaning}")
    yield _fill(f"**Confirm.** {alert.confirm}")
    yield "**First steps.**"
    yield "\n".join(_fill(step, "- ") for step in alert.steps)
    yield _fill(f"**Silence** it {alert.silence}")


def _fill(text: str, bullet: str = "") -> str:
    return textwrap.fill(
        bullet + text, WIDTH, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Its description is that of its first metric. Expressions name metrics without the labels of the
    dashboard's variables, which `selected` adds.
    """

    title: str
    unit: str  # identifier of Grafana
    queries: tuple[tuple[str, str], ...]  # expressions with their legends
    kind: Literal["timeseries", "stat"] = "timeseries"
    is_stacked: bool = False


def _rate(metric: str, *labels: str) -> str:
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({PREFIX}{metric}[$__rate_interval]))"


def _mean(histogram: str, *labels: str) -> str:
    return f"{_rate(f'{histogram}_sum', *labels)} / {_rate(f'{histogram}_count', *labels)}"


def _quantile(quantile: float, histogram: str) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{histogram}_bucket', 'le')})"


def _quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(one / 100, histogram), f"p{one}") for one in (50, 95, 99))


def _by(label: str, metric: str) -> tuple[tuple[str, str], ...]:
    """Sum a gauge by a label."""
    return ((f"sum by ({label}) ({PREFIX}{metric})", f"{{{{{label}}}}}"),)


def _rate_by(label: str, counter: str) -> tuple[tuple[str, str], ...]:
    return ((_rate(counter, label), f"{{{{{label}}}}}"),)


def _rate_above_zero(label: str, counter: str) -> tuple[tuple[str, str], ...]:
    """Leave out the many values of a label that never occur."""
    return ((f"{_rate(counter, label)} > 0", f"{{{{{label}}}}}"),)


PERCENT, SECONDS, PER_S, BYTES, COUNT = "percentunit", "s", "reqps", "bytes", "short"
MODEL = "model_name"
SERVER_ERRORS = 'http_requests_total{status=~"5.."}'

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Overview",
        (
            Panel("Workers", COUNT, ((f"sum({PREFIX}workers)", ""),), "stat"),
            Panel("Requests", PER_S, ((_rate("http_requests_total"), ""),), "stat"),
            Panel(
                "Server errors",
                PERCENT,
                ((f"{_rate(SERVER_ERRORS)} / {_rate('http_requests_total')}", ""),),
                "stat",
            ),
            Panel("Latency p95", SECONDS, ((_quantile(0.95, "e2e_request_latency_seconds"), ""),), "stat"),
            Panel("Running", COUNT, ((f"sum({PREFIX}num_requests_running)", ""),), "stat"),
            Panel("Waiting", COUNT, ((f"sum({PREFIX}num_requests_waiting)", ""),), "stat"),
            Panel("Generated tokens per second", COUNT, ((_rate("generation_tokens_total"), ""),), "stat"),
            Panel("Failed bundles", COUNT, ((f"sum({PREFIX}models_failed)", ""),), "stat"),
        ),
    ),
    (
        "Requests",
        (
            Panel("Requests by status", PER_S, _rate_by("status", "http_requests_total"), is_stacked=True),
            Panel("Requests by route", PER_S, _rate_by("route", "http_requests_total"), is_stacked=True),
            Panel("Failures by error code", PER_S, _rate_above_zero("code", "request_failure_total")),
            Panel("Refusals by limit", PER_S, _rate_above_zero("limit", "limit_reached_total")),
            Panel("Finished sequences by reason", PER_S, _rate_above_zero("finished_reason", "request_success_total")),
        ),
    ),
    (
        "Latency",
        (
            Panel("Latency of calls", SECONDS, _quantiles("e2e_request_latency_seconds")),
            Panel("Time to first token", SECONDS, _quantiles("time_to_first_token_seconds")),
            Panel("Inter-token latency", SECONDS, _quantiles("inter_token_latency_seconds")),
            Panel("Queue time", SECONDS, _quantiles("request_queue_time_seconds")),
            Panel(
                "Mean time of a sequence",
                SECONDS,
                tuple(
                    (_mean(f"request_{part}_time_seconds"), legend)
                    for part, legend in (("queue", "queue"), ("prefill", "encoder or prefill"), ("decode", "decoder"))
                ),
                is_stacked=True,
            ),
        ),
    ),
    (
        "Engine",
        (
            Panel("Running sequences", COUNT, _by(MODEL, "num_requests_running")),
            Panel("Waiting sequences", COUNT, _by(MODEL, "num_requests_waiting")),
            Panel(
                "Tokens per second",
                COUNT,
                (
                    (_rate("prompt_tokens_total", MODEL), "{{model_name}} prompt"),
                    (_rate("generation_tokens_total", MODEL), "{{model_name}} generation"),
                ),
            ),
            Panel("Rows of a decoder step", COUNT, ((_mean("batch_size_rows", MODEL), "{{model_name}}"),)),
            Panel("Decoder step time", SECONDS, _quantiles("engine_step_seconds")),
            Panel("Encoder batch size", COUNT, ((_mean("encoder_batch_size", MODEL), "{{model_name}}"),)),
            Panel("Encoder batch time", SECONDS, _quantiles("encoder_batch_seconds")),
            Panel("Encoder padding", PERCENT, ((_mean("batch_padding_ratio", MODEL), "{{model_name}}"),)),
            Panel(
                "Prefix cache hit rate",
                PERCENT,
                (
                    (
                        f"{_rate('prefix_cache_hits_total', MODEL)} / {_rate('prefix_cache_queries_total', MODEL)}",
                        "{{model_name}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Memory",
        (
            Panel(
                "Memory by model",
                BYTES,
                (
                    *((query, f"{legend} weights") for query, legend in _by(MODEL, "model_weight_bytes")),
                    *((query, f"{legend} decoder state") for query, legend in _by(MODEL, "model_max_state_bytes")),
                    *(
                        (query, f"{legend} prefix cache")
                        for query, legend in _by(MODEL, "model_max_prefix_cache_bytes")
                    ),
                ),
                is_stacked=True,
            ),
            Panel(
                "Decoder state in use",
                PERCENT,
                (
                    (
                        f"sum by ({MODEL}) ({PREFIX}model_state_bytes) / "
                        f"(sum by ({MODEL}) ({PREFIX}model_max_state_bytes) > 0)",
                        "{{model_name}}",
                    ),
                ),
            ),
            Panel("Prefix cache in use", BYTES, _by(MODEL, "model_prefix_cache_bytes")),
            Panel("Resident memory", BYTES, _by("instance", "process_resident_memory_bytes")),
        ),
    ),
    (
        "Processes",
        (
            Panel("Processors in use", COUNT, _rate_by("instance", "process_cpu_seconds_total")),
            Panel("Open connections", COUNT, _by("instance", "connections")),
            Panel(
                "File descriptors in use",
                PERCENT,
                ((f"{PREFIX}process_open_fds / {PREFIX}process_max_fds", "{{instance}}"),),
            ),
            Panel(
                "Workers",
                COUNT,
                (
                    (f"sum by (instance) ({PREFIX}workers)", "{{instance}} serving"),
                    (f"sum by (instance) ({PREFIX}workers_failed)", "{{instance}} failed"),
                ),
            ),
            Panel("Dropped log lines per second", COUNT, _rate_by("instance", "log_lines_dropped_total")),
            Panel(
                "Load time of models", SECONDS, ((f"max by ({MODEL}) ({PREFIX}model_load_seconds)", "{{model_name}}"),)
            ),
        ),
    ),
    (
        "API keys (empty without SIGHTLINE_KEYS)",
        (
            Panel("Requests by key", PER_S, _rate_by("key", "key_requests_total"), is_stacked=True),
            Panel("Tokens per second by key", COUNT, ((_rate("key_tokens_total", "key", "kind"), "{{key}} {{kind}}"),)),
        ),
    ),
)

VARIABLES = (  # names, labels and queries
    ("job", "Job", "label_values(sightline_build_info, job)"),
    ("instance", "Instance", 'label_values(sightline_build_info{job=~"$job"}, instance)'),
    (
        "model",
        "Model",
        'label_values(sightline_num_requests_running{job=~"$job",instance=~"$instance"}, model_name)',
    ),
)
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NUM_COLUMNS = 24
STAT_SIZE, GRAPH_SIZE = (3, 4), (8, 8)  # columns and rows of a panel


@cache
def _metrics() -> Metrics:
    return Metrics("0")


def _family(metric: str) -> str:
    """Return the name of a metric without the prefix and the suffix of a sample."""
    return re.sub(r"_(bucket|sum|count|total)$", "", metric.removeprefix(PREFIX))


def selected(expr: str) -> str:
    """Add the labels of the dashboard's variables to each metric of an expression."""
    metrics = _metrics()
    of_models = {*metrics.gauges, *metrics.counters, *metrics.histograms, "request_success"}

    def select(match: re.Match[str]) -> str:
        filters = [match[2]] if match[2] else []
        filters += ['job=~"$job"', 'instance=~"$instance"']
        if _family(match[1]) in of_models:
            filters.append('model_name=~"$model"')
        return f"{match[1]}{{{','.join(filters)}}}"

    return re.sub(rf"\b({PREFIX}\w+)(?:\{{([^}}]*)\}})?", select, expr)


def dashboard_file() -> str:
    """Return the dashboard in the format of Grafana."""
    dashboard = {
        "uid": "sightline",
        "title": "Sightline",
        "description": "Generated from docs/monitoring.py of Sightline.",
        "tags": ["sightline"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one cursor in all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), *(_variable(*one) for one in VARIABLES)]},
        "panels": list(_panels()),
    }
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 1,  # by name
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    y = number = 0
    for title, panels in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": NUM_COLUMNS, "h": 1},
        }
        y += 1
        x = 0
        for panel in panels:
            width, height = STAT_SIZE if panel.kind == "stat" else GRAPH_SIZE
            if x + width > NUM_COLUMNS:
                x, y = 0, y + height
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": width, "h": height})
            x += width
        y += height


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if panel.kind == "timeseries":
        mode = "normal" if panel.is_stacked else "none"
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never", "stacking": {"mode": mode, "group": "A"}}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": _description(panel),
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": selected(expr), "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _description(panel: Panel) -> str:
    """Return the description of the first metric of a panel."""
    (first, *_) = named_metrics(query for query, _ in panel.queries)
    documentation = {metric.name: metric.documentation for metric in _metrics().registry.collect()}
    return documentation[PREFIX + _family(first)]


def named_metrics(exprs: Iterable[str]) -> list[str]:
    """Return the names of the metrics in expressions, in their order."""
    return [name for expr in exprs for name in re.findall(rf"\b{PREFIX}\w+", expr)]
