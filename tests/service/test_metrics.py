import asyncio
import itertools
import math
import re
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from sightline.base.machine import usable_memory
from sightline.service.api_errors import CLIENT_GONE, ERRORS
from sightline.service.metrics import PREFIX, Metrics, merge, sums, texts_of, without_gauges
from sightline.service.settings import Settings
from tests.service.conftest import MakeBackend, Start, until

pytestmark = pytest.mark.anyio

# Metric names of vLLM, for which dashboards and autoscalers exist.
KNOWN = {
    *("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "request_failure_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    "request_decode_time_seconds",
}


async def rendered(metrics: Metrics) -> str:
    return "".join(await texts_of(metrics.registry.collect()))


def metric_names(text: str) -> set[str]:
    return {name.removeprefix(PREFIX) for name in re.findall(r"^# TYPE (\S+)", text, flags=re.MULTILINE)}


async def test_every_metric_has_the_prefix_and_the_suffixes_of_vllm_exist() -> None:
    text = await rendered(Metrics("1.2.3"))
    assert metric_names(text) >= KNOWN
    assert all(line.startswith((f"# HELP {PREFIX}", f"# TYPE {PREFIX}", PREFIX)) for line in text.splitlines())
    assert 'sightline_build_info{version="1.2.3"} 1.0' in text


async def test_the_text_equals_that_of_the_library_while_values_and_samples_change(start: Start) -> None:
    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("sightline_process_")]

    async with start() as running:
        metrics = running.app.state.service.metrics
        for inputs in ("x", 'a "dog"\\', "", "Hund"):
            await running.post("/v1/generate", {"inputs": inputs})
            await running.client.get(f"/v1/models/{inputs or 'none'}")
            assert lines(await rendered(metrics)) == lines(generate_latest(metrics.registry).decode())
        metrics.for_model('one\n"more"')
        assert lines(await rendered(metrics)) == lines(generate_latest(metrics.registry).decode())


async def test_limits_are_gauges_by_the_names_of_their_settings(start: Start) -> None:
    async with start(max_rows=7, max_waiting_sequences=11) as running:
        assert await running.metric('sightline_limit{setting="max_rows"}') == 7
        assert await running.metric('sightline_limit{setting="max_waiting_sequences"}') == 11
        text = (await running.client.get("/metrics")).text
        shown = re.findall(r'^sightline_limit{setting="(\w+)"}', text, flags=re.MULTILINE)
        assert set(shown) == {name for name in Settings.model_fields if name.startswith("max_")}


async def test_limits_that_follow_from_the_machine_show_the_used_values(start: Start) -> None:
    async with start() as running:
        (model,) = running.app.state.service.models.values()
        assert await running.metric('sightline_limit{setting="max_rows"}') == model.max_rows > 0
        assert await running.metric('sightline_limit{setting="max_state_bytes"}') == usable_memory() // 2


async def test_the_process_shows_its_memory_and_descriptors(start: Start) -> None:
    async with start() as running:
        open_fds = await running.metric("sightline_process_open_fds")
        assert 0 < open_fds < await running.metric("sightline_process_max_fds")
        with Path("/dev/null").open(), Path("/dev/null").open():
            assert await running.metric("sightline_process_open_fds") == open_fds + 2
        resident = await running.metric("sightline_process_resident_memory_bytes")
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        (in_kib,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, flags=re.MULTILINE)
        assert resident == pytest.approx(int(in_kib) * 1024, rel=0.1)


async def test_metrics_agree_with_the_responses(start: Start) -> None:
    async with start() as running:
        bodies: list[dict[str, Any]] = [
            {"inputs": ["a dog", "x"]},
            {"inputs": "Hund", "parameters": {"max_new_tokens": 1}},
            {"inputs": "Hund", "stream": True, "parameters": {"max_new_tokens": 3, "min_new_tokens": 3}},
        ]
        responses = [await running.post("/v1/generate", body) for body in bodies]
        usage = [response.json()["usage"] for response in responses[:2]]
        model = '{model_name="fake"}'
        tokens_of_stream = 3
        assert await running.metric(f"sightline_prompt_tokens_total{model}") == (
            sum(one["input_tokens"] for one in usage) + usage[1]["input_tokens"]
        )
        assert await running.metric(f"sightline_generation_tokens_total{model}") == (
            sum(one["output_tokens"] for one in usage) + tokens_of_stream
        )
        eos = 'sightline_request_success_total{finished_reason="eos",model_name="fake"}'
        length = 'sightline_request_success_total{finished_reason="length",model_name="fake"}'
        assert (await running.metric(eos), await running.metric(length)) == (2, 2)
        assert await running.metric(f"sightline_request_queue_time_seconds_count{model}") == 4
        assert await running.metric(f"sightline_request_decode_time_seconds_count{model}") == 4
        assert await running.metric(f"sightline_e2e_request_latency_seconds_count{model}") == 3
        assert await running.metric(f"sightline_time_to_first_token_seconds_count{model}") == 1
        assert await running.metric(f"sightline_inter_token_latency_seconds_count{model}") == tokens_of_stream - 1
        steps = running.backend.runners[0].num_steps
        assert await running.metric(f"sightline_engine_step_seconds_count{model}") == steps
        assert await running.metric(f"sightline_batch_size_rows_count{model}") == steps
        assert await running.metric('sightline_http_requests_total{route="/v1/generate",status="200"}') == 3


async def test_a_call_that_a_compatible_api_rejects_before_it_encodes_is_no_success(start: Start) -> None:
    async with start() as running:
        for path, body in (
            ("/v1/embeddings", {"model": "fake", "input": "x", "dimensions": 3}),
            ("/embed", {"inputs": "x", "dimensions": 3}),
        ):
            assert 400 <= (await running.post(path, body)).status_code < 500
            assert sum(runner.num_encodes for runner in running.backend.runners) == 0
        model = '{model_name="fake"}'
        assert await running.metric(f"sightline_e2e_request_latency_seconds_count{model}") == 0
        assert (await running.post("/v1/encode", {"inputs": "x"})).status_code == 200
        assert await running.metric(f"sightline_e2e_request_latency_seconds_count{model}") == 1


async def test_a_slow_reader_does_not_increase_token_latencies(start: Start) -> None:
    sent: list[Message] = []
    body = orjson.dumps({"inputs": "x", "stream": True, "parameters": {"min_new_tokens": 8, "max_new_tokens": 8}})

    async def receive() -> Message:
        await asyncio.sleep(0 if not received else 60)
        received.append(True)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)
        await asyncio.sleep(0.2)

    received: list[bool] = []
    async with start() as running:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/generate",
            "raw_path": b"/v1/generate",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        await running.app(scope, receive, send)
        assert sent[0]["status"] == 200
        model = '{model_name="fake"}'
        assert await running.metric(f"sightline_inter_token_latency_seconds_count{model}") == 7
        assert await running.metric(f"sightline_inter_token_latency_seconds_sum{model}") < 7 * 0.2


async def test_tokens_of_all_outputs_count_and_those_of_a_prefix_do_not(start: Start) -> None:
    async with start() as running:
        parameters = {"num_beams": 3, "num_return_sequences": 2, "target_prefix": "a dog", "max_new_tokens": 6}
        response = (await running.post("/v1/generate", {"inputs": "x", "parameters": parameters})).json()
        counted = await running.metric('sightline_generation_tokens_total{model_name="fake"}')
        assert counted == response["usage"]["output_tokens"]
        reason = response["outputs"][0]["finish_reason"]
        labels = f'{{finished_reason="{reason}",model_name="fake"}}'
        assert await running.metric(f"sightline_request_success_total{labels}") == 1


async def test_calls_are_counted_once_after_any_outcome(start: Start) -> None:
    async with start() as running:
        for path, body in (
            *((("/v1/generate"), {"inputs": text}) for text in ("x", "", "x" * 99)),
            ("/nothing", {}),
            ("/v1/encode", {"inputs": "x"}),
        ):
            await running.post(path, body)
        text = (await running.client.get("/metrics")).text
        calls = sum(
            float(value) for value in re.findall(r"^sightline_http_requests_total\S+ (\S+)", text, re.MULTILINE)
        )
        failures = sum(
            float(value) for value in re.findall(r"^sightline_request_failure_total\S+ (\S+)", text, re.MULTILINE)
        )
        assert (calls, failures) == (5, 3)


async def test_a_rejected_call_is_counted_by_the_limit_that_rejected_it(
    start: Start, make_backend: MakeBackend
) -> None:
    sample = 'sightline_limit_reached_total{limit="waiting_sequences"}'
    async with start(make_backend(step_s=0.02), max_rows=1, max_waiting_sequences=1) as running:
        assert f"{sample} 0.0" in (await running.client.get("/metrics")).text
        first = asyncio.ensure_future(
            running.post("/v1/generate", {"inputs": "x", "parameters": {"min_new_tokens": 9}})
        )
        await until(lambda: running.backend.engines[0].num_running == 1)
        assert (await running.post("/v1/generate", {"inputs": ["x", "y"]})).status_code == 429
        assert await running.metric(sample) == 1
        await first


async def test_every_error_code_has_a_counter_before_its_first_error() -> None:
    """A series that begins at 1 has no rate: an alert would not fire on the first error."""
    text = await rendered(Metrics("1.2.3"))
    for code in (*ERRORS, CLIENT_GONE):
        assert f'sightline_request_failure_total{{code="{code}",model_name=""}} 0.0' in text


async def test_the_series_of_a_model_appear_with_its_first_use(start: Start, make_backend: MakeBackend) -> None:
    names = [f"multi30k-en-{number}" for number in range(12)]
    async with start(make_backend(*names)) as running:
        assert 'model_name="multi30k-en-' not in (await running.client.get("/metrics")).text
        for name in names[:10]:
            for inputs, status in (("a dog", 200), ("x" * 99, 422)):
                assert (await running.post("/v1/generate", {"model": name, "inputs": inputs})).status_code == status
        text = (await running.client.get("/metrics")).text
        assert {*re.findall(r'model_name="([^"]+)"', text)} == {*names[:10]}
        assert len(text) < 60_000 and text.count("\n") < 900
        assert await running.metric('sightline_num_requests_running{model_name="multi30k-en-3"}') == 0
        assert 'sightline_model_reloads_total{model_name="multi30k-en-3"} 0.0' in text
        assert 'sightline_request_failure_total{code="input_too_long",model_name="multi30k-en-3"} 1.0' in text
        assert 'sightline_request_failure_total{code="internal",model_name="multi30k-en-3"} 0.0' in text


@pytest.mark.parametrize("timeout_s", [0.3, 30.0, 100.0, 20_000.0])
async def test_the_buckets_of_histograms_end_at_the_longest_time_of_a_request(timeout_s: float) -> None:
    metrics = Metrics("1.2.3", timeout_s)
    for name, histogram in metrics.histograms.items():
        metrics.for_model("toy").observe(name, 0.1)
        bounds = [
            float(sample.labels["le"])
            for family in histogram.collect()
            for sample in family.samples
            if sample.name.endswith("_bucket")
        ]
        assert bounds == sorted({*bounds}) and (not bounds or bounds[-2:] == [timeout_s, math.inf]), name
        assert all(later <= 12 * earlier for earlier, later in itertools.pairwise(bounds[:-1]))


async def test_a_process_counts_as_a_worker_while_it_serves(start: Start, make_backend: MakeBackend) -> None:
    backend = make_backend(wait_for=threading.Event())
    async with start(backend) as running:
        assert await running.metric("sightline_workers") == 0
        assert backend.wait_for is not None
        backend.wait_for.set()
        service = running.app.state.service
        await until(lambda: service.unavailable_code is None)
        assert await running.metric("sightline_workers") == 1
        service.is_retiring = True
        assert await running.metric("sightline_workers") == 0


async def test_encoder_batches_show_their_size_duration_and_padding(start: Start) -> None:
    async with start() as running:
        await running.post("/v1/encode", {"inputs": "a dog"})
        assert await running.metric('sightline_batch_padding_ratio_count{model_name="fake"}') == 1
        assert await running.metric('sightline_batch_padding_ratio_sum{model_name="fake"}') == 0
        assert await running.metric('sightline_encoder_batch_size_sum{model_name="fake"}') == 1
        assert await running.metric('sightline_encoder_batch_seconds_count{model_name="fake"}') == 1
        encoded = 'sightline_request_success_total{finished_reason="encoded",model_name="fake"}'
        assert await running.metric(encoded) == 1


async def test_gauges_follow_the_engine(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend(step_s=0.02), max_rows=1) as running:
        body = {"inputs": ["x", "y"], "parameters": {"min_new_tokens": 5}}
        call = asyncio.ensure_future(running.post("/v1/generate", body))
        await until(lambda: running.backend.engines[0].num_running == 1)
        assert await running.metric('sightline_num_requests_running{model_name="fake"}') == 1
        assert await running.metric('sightline_num_requests_waiting{model_name="fake"}') == 1
        await call
        await until(lambda: running.backend.num_busy == 0)
        assert await running.metric('sightline_num_requests_running{model_name="fake"}') == 0


async def test_metrics_of_one_process_stay_as_they_are_with_any_label_and_value() -> None:
    metrics = Metrics("1.2.3")
    metrics.call_counter('/a "b" \\ c\nd\u2028e }{', 200, None)()
    metrics.histograms["batch_size_rows"].labels("toy").observe(1e-300)
    for value in (0.1 + 0.2, 1e23, -1e-7, float("inf"), float("-inf"), float("nan")):
        metrics.process_gauges["connections"].set(value)
        texts = await texts_of(metrics.registry.collect())
        assert merge([texts]) == texts
        # As the library reads and writes them.
        families = [*text_string_to_metric_families("".join(texts))]
        assert len(families) == len(texts)
        assert sums(texts) == {
            (one.name.removeprefix(PREFIX), one.labels["model_name"]): one.value
            for family in families
            for one in family.samples
            if "model_name" in one.labels and "le" not in one.labels
        }


async def test_the_metrics_of_several_processes_add_up_except_what_is_the_same_in_all() -> None:
    pages = []
    for count, load_seconds in ((2, 3.0), (5, 1.0)):
        metrics = Metrics("1.2.3")
        metrics.set_limits({"max_connections": 100, "max_waiting_bytes": 50})
        metrics.process_gauges["models_failed"].set(1)
        metrics.for_model("toy").observe("request_queue_time_seconds", 0.2)
        metrics.gauges["model_load_seconds"].labels("toy").set(load_seconds)
        metrics.gauges["num_requests_running"].labels("toy").set(count)
        metrics.process_gauges["connections"].set(count)
        for _ in range(count):
            metrics.call_counter("/v1/generate", 200, None)()
            metrics.histograms["batch_size_rows"].labels("toy").observe(3)
        pages.append(await texts_of(metrics.registry.collect()))
    last = without_gauges(pages[-1])
    assert {re.findall(r"^# TYPE \S+ (\S+)$", text, re.MULTILINE)[0] for text in last} == {
        "counter",
        "histogram",
        "summary",
    }
    open_fds = [
        float(text.split()[-1]) for page in pages for text in page if "# TYPE sightline_process_open_fds" in text
    ]
    text = "".join(merge([*pages, last]))
    for sample, expected in {
        'http_requests_total{route="/v1/generate",status="200"}': 12,
        'request_queue_time_seconds_bucket{le="1.0",model_name="toy"}': 3,
        'batch_size_rows_count{model_name="toy"}': 12,
        'batch_size_rows_sum{model_name="toy"}': 36,
        'num_requests_running{model_name="toy"}': 7,
        'model_load_seconds{model_name="toy"}': 3,
        'limit{setting="max_connections"}': 100,
        'limit{setting="max_waiting_bytes"}': 100,
        "models_failed": 1,
        "connections": 7,
        'build_info{version="1.2.3"}': 1,
        "process_open_fds": max(open_fds),
    }.items():
        assert f"sightline_{sample} {float(expected)}\n" in text
    assert text.count("# TYPE sightline_http_requests_total") == 1
