"""Traces of calls, received by a collector that speaks OTLP, and the header Server-Timing."""

import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sightline.base.errors import UsageError
from sightline.service import logs, traces
from sightline.service.traces import check_traces
from tests.service.conftest import MakeBackend, Serve, Start, wait_until
from tests.support.fake_runner import fake_manifest

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
BODY = {"inputs": "a secret dog", "parameters": {"max_new_tokens": 5}}


@dataclass
class Collector:
    """A collector, and the spans that it has received."""

    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    data: bytes = b""

    def named(self, name: str) -> Any:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def receive(self, data: bytes) -> None:
        self.data += data
        for batch in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append({one.key: one.value.string_value for one in batch.resource.attributes})
            self.spans += [span for scope in batch.scope_spans for span in scope.spans]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            data = self.rfile.read(int(self.headers["content-length"]))
            received.receive(gzip.decompress(data) if self.headers["content-encoding"] == "gzip" else data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Collector()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield received
        server.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(item) for item in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {one.key: value(one.value) for one in span.attributes}


async def test_a_call_is_a_span_with_a_child_for_each_phase_and_without_its_texts(
    start: Start, collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logs.access_logger.name)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=translations,deployment.environment.name=test")
    before = time.time_ns()
    async with start() as running:
        response = await running.post("/v1/generate", BODY, traceparent=SAMPLED, **{"x-request-id": "r1"})
        assert (await running.client.get("/health/ready")).headers.get("traceresponse") is None
    server = collector.named("POST /v1/generate")
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert server.kind == server.SPAN_KIND_SERVER
    assert response.headers["traceresponse"] == f"00-{TRACE}-{server.span_id.hex()}-01"
    assert vars(caplog.records[-1])[logs.FIELDS]["trace_id"] == TRACE
    assert attributes(server) == {
        "http.request.method": "POST",
        "http.route": "/v1/generate",
        "http.response.status_code": 200,
        "gen_ai.provider.name": "sightline",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": response.json()["usage"]["input_tokens"],
        "gen_ai.usage.output_tokens": response.json()["usage"]["output_tokens"],
        "gen_ai.response.finish_reasons": [response.json()["outputs"][0]["finish_reason"]],
        "sightline.request_id": "r1",
    }
    children = sorted(
        (span for span in collector.spans if span is not server), key=lambda one: one.start_time_unix_nano
    )
    assert [span.name for span in children] == ["tokenize", "queue", "encode", "decode"]
    timings = response.json()["timings_ms"]
    times = [before, server.start_time_unix_nano]
    for span in children:
        assert (span.trace_id, span.parent_span_id) == (server.trace_id, server.span_id)
        milliseconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        assert milliseconds == pytest.approx(timings[span.name], abs=0.001)
        times += [span.start_time_unix_nano, span.end_time_unix_nano]
    times += [server.end_time_unix_nano, time.time_ns()]
    assert times == sorted(times)
    assert b"secret" not in collector.data
    assert collector.resources[0]["service.name"] == "translations"
    assert collector.resources[0]["deployment.environment.name"] == "test"


async def test_prompts_errors_and_streams_are_traced(
    start: Start, make_backend: MakeBackend, collector: Collector
) -> None:
    backend = make_backend(step_s=0.01)
    sizes = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64, "max_target_tokens": 128}
    backend.manifests = (fake_manifest("fake", **sizes, decoder_start="source"),)
    keys = Path("tests/data/keys.json")
    async with start(backend, keys=keys) as running:
        running.client.headers["x-api-key"] = "sl-alice"
        sampled = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.5, "seed": 3, "stop": ["a secret"]}
        await running.post("/v1/generate", {**BODY, "stream": True, "parameters": sampled})
        await running.post("/v1/score", {"inputs": ""})
        await running.post("/nowhere", {})
        await running.post("/v1/attention", BODY, **{"x-request-timeout-ms": "1"})
    names = ("POST /v1/generate", "POST /v1/score", "POST", "POST /v1/attention")
    generated, failed, lost, late = map(collector.named, names)
    phases = {span.name for span in collector.spans if span.parent_span_id == generated.span_id}
    assert phases == {"tokenize", "queue", "prefill", "decode"}
    assert attributes(generated)["gen_ai.usage.output_tokens"] == 5
    requested = {name: value for name, value in attributes(generated).items() if name.startswith("gen_ai.request.")}
    assert requested == {
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
    }
    assert b"secret" not in collector.data
    assert attributes(failed)["error.type"] == "empty_input"
    assert failed.status.code == failed.status.STATUS_CODE_UNSET  # it is the client's error
    assert (late.status.code, late.status.message) == (late.status.STATUS_CODE_ERROR, "deadline_exceeded")
    assert attributes(lost)["http.response.status_code"] == 404 and "http.route" not in attributes(lost)
    assert attributes(generated)["sightline.key"] == "alice"
    assert b"sl-alice" not in collector.data
    assert len({span.trace_id for span in collector.spans}) == 4


def test_a_call_whose_client_leaves_before_the_response_is_traced(
    serve: Serve, make_backend: MakeBackend, collector: Collector
) -> None:
    with serve(make_backend(step_s=0.02)) as wire:
        connection = wire.http()
        body = {"inputs": "a secret dog", "parameters": {"min_new_tokens": 60, "max_new_tokens": 60}}
        headers = {"Content-Type": "application/json", "traceparent": SAMPLED}
        connection.request("POST", "/v1/generate", json.dumps(body), headers)
        wait_until(lambda: wire.backend.engines[0].num_running == 1)
        connection.close()
        wire.wait_idle()
    span = collector.named("POST /v1/generate")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes(span)
    assert (found["http.response.status_code"], found["error.type"]) == (499, "client_closed_request")
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert span.end_time_unix_nano > span.start_time_unix_nano


@pytest.mark.parametrize(
    ("sampling", "parent", "is_sent"), [(0, None, False), (0, SAMPLED, True), (1, NOT_SAMPLED, False)]
)
async def test_the_client_decides_if_its_calls_are_traced_and_the_sampler_for_others(
    start: Start,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    sampling: int,
    parent: str | None,
    is_sent: bool,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(sampling))
    async with start() as running:
        headers = {} if parent is None else {"traceparent": parent}
        response = await running.post("/v1/generate", BODY, **headers)
        assert bool(int(response.headers["traceresponse"][-2:], 16) & 1) is is_sent
    assert bool(collector.spans) is is_sent


async def test_all_lines_of_tracestate_count(start: Start, collector: Collector) -> None:
    lines = [("traceparent", SAMPLED), ("tracestate", "a=1,b=2"), ("tracestate", "c=3")]
    async with start() as running:
        await running.client.post("/v1/generate", json=BODY, headers=lines)
    assert collector.named("POST /v1/generate").trace_state == "a=1,b=2,c=3"


@pytest.mark.parametrize("end", ["/", "/v1/traces", "/v1/traces/"])
async def test_the_address_of_a_collector_may_have_the_path_of_traces(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + end)
    async with start() as running:
        await running.post("/v1/generate", BODY)
    assert collector.spans


async def test_a_collector_that_is_away_disturbs_neither_calls_nor_the_end(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sightline.service.inference.service.SHUTDOWN_TIMEOUT_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@127.0.0.1:9")
    async with start() as running:
        assert (await running.post("/v1/generate", BODY)).status_code == 200
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").error("no collector")
        assert getattr(caplog.records[-1], logs.FIELDS) == {"url": "http://127.0.0.1:9/v1/traces"}
        (sender,) = {thread for thread in threading.enumerate() if thread.name == "OtelBatchSpanRecordProcessor"}
        ended = time.monotonic()
    sender.join(60)
    assert not sender.is_alive()
    assert time.monotonic() - ended < 5


@pytest.mark.parametrize("is_disabled", [False, True])
async def test_without_a_collector_there_is_no_trace_and_the_durations_are_in_a_header(
    start: Start, monkeypatch: pytest.MonkeyPatch, *, is_disabled: bool
) -> None:
    if is_disabled:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    async with start() as running:
        response = await running.post("/v1/generate", BODY, traceparent=SAMPLED)
        assert "traceresponse" not in response.headers
        header = dict(one.split(";dur=") for one in response.headers["server-timing"].split(", "))
        timings = response.json()["timings_ms"]
        assert list(header) == ["tokenize", "queue", "encode", "decode", "total"]
        assert {name: float(header[name]) for name in list(header)[:-1]} == {
            name: timings[name] for name in list(header)[:-1]
        }
        assert float(header["total"]) >= timings["total"]
        assert "server-timing" not in (await running.post("/v1/generate", {"inputs": ""})).headers


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://collector:4317", "http://"])
def test_an_endpoint_must_be_a_url(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with pytest.raises(UsageError, match="must be a URL that begins with http:// or https://"):
        check_traces()


def test_traces_need_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "find_spec", lambda name: None)
    check_traces()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318")
    with pytest.raises(
        UsageError, match=r"^OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is .*run pip install '.*\[cpu,traces\]'"
    ):
        check_traces()
