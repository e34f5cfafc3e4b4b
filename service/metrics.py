"""Prometheus metrics of the service.

Names after the prefix `sightline_`, and meanings, follow vLLM where both have the same metric.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sightline.service.api_errors import CLIENT_GONE, ERRORS, Limit
from sightline.service.engine.engine import Engine
from sightline.service.engine.observer import EngineObserver
from sightline.service.engine.request import (
    Encoded,
    EncodeRequest,
    Event,
    Generated,
    GenerateRequest,
    Request,
    Timings,
)
from sightline.service.logs import num_dropped_lines
from sightline.service.runtime.state_memory import ModelMemory

NAMESPACE = "sightline"
PREFIX = f"{NAMESPACE}_"
MODEL = "model_name"  # label, as in vLLM
FAILED_WORKERS = "workers_failed"  # gauge that the supervisor sets

# Gauges of each model with their descriptions.
MODEL_GAUGES: Mapping[str, str] = {
    "num_requests_running": "Number of sequences in the running batch.",
    "num_requests_waiting": "Number of sequences that wait for the encoder or for a slot of the running batch.",
    "model_load_seconds": "Duration of the last load of the model in seconds.",
    "model_weight_bytes": "Size of the graphs and weights on disk in bytes.",
    "model_state_bytes_per_row": "Maximum decoder state of one row in bytes.",
    "model_max_state_bytes": "Maximum decoder state of all slots in bytes.",
    "model_state_bytes": "Decoder state reserved by running sequences in bytes, as if they had the maximum length.",
    "model_max_prefix_cache_bytes": "Maximum size of the prefix cache in bytes.",
    "model_prefix_cache_bytes": "Size of the states in the prefix cache in bytes.",
}

# Counters of each model with their descriptions.
MODEL_COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Number of source tokens of finished sequences, special tokens included.",
    "generation_tokens": "Number of generated tokens in the returned outputs of finished sequences.",
    "prefix_cache_queries": "Number of prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Number of prompt tokens whose states came from the prefix cache.",
    "texts_checked": "Number of texts whose coverage of their source was computed.",
    "texts_with_omissions": "Number of these texts that omit words of their source.",
    "model_reloads": "Number of times that a model was loaded again because a step of it did not end.",
}

# Gauges of each process with their descriptions.
PROCESS_GAUGES: Mapping[str, str] = {
    "connections": "Number of open connections.",
    "workers": "Number of processes that serve requests; 0 while the models load.",
    FAILED_WORKERS: "Number of workers that failed to start and are not started again.",
    "models_failed": "Number of bundles that failed to load.",
}

# Bounds of histogram buckets in seconds; `_buckets` ends them at the request timeout. Alerts use
# those of 1 s and 5 s.
MINUTES = (60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, *MINUTES)
QUEUE_SECONDS = (0.1, 1.0, 5.0, *MINUTES)
TOKEN_SECONDS = (0.005, 0.025, 0.1, 1.0, 10.0, *MINUTES)
# Histograms of each model with descriptions and bounds, and summaries, which have no buckets. There
# are few buckets, because each model has all of them.
MODEL_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token of streamed sequences in seconds.", SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of a streamed sequence in seconds.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": (
        "Time from arrival to the end of the response of successful calls in seconds.",
        SECONDS,
    ),
    "request_queue_time_seconds": ("Time that a sequence waited in the queue in seconds.", QUEUE_SECONDS),
}
MODEL_SUMMARIES: Mapping[str, str] = {
    "request_prefill_time_seconds": "Time from the start of its encoder run or prefill until a sequence can be "
    "decoded, in seconds.",
    "request_decode_time_seconds": "Time that a sequence spent in the decoder in seconds.",
    "engine_step_seconds": "Duration of one decoder step of the batch in seconds.",
    "batch_size_rows": "Number of sequences in a decoder step; a beam search counts once for each beam.",
    "encoder_batch_size": "Number of sequences in an encoder batch, or with a common prompt.",
    "encoder_batch_seconds": "Duration of an encoder batch, or of reading a prompt, in seconds.",
    "batch_padding_ratio": "Fraction of padding in an encoder batch.",
}
STARTED = ("prompt_tokens", "generation_tokens", "model_reloads")  # counters that begin at 0 with a model's first use


def _buckets(bounds: Iterable[float], limit: float) -> tuple[float, ...]:
    return (*(bound for bound in bounds if bound < limit), limit)


class Metrics:
    """All metrics of one process."""

    def __init__(self, version: str, timeout_s: float = 30.0) -> None:
        """`timeout_s` is the request timeout, at which the buckets of histograms end."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # rarely used, and they double the page
        self.registry = CollectorRegistry()
        # Returns the metrics of a model by its name; they stay when it is unloaded. Models that no
        # call uses have no series.
        self.for_model: Callable[[str], ModelMetrics] = cache(partial(ModelMetrics, self))
        self.gauges = {name: self._gauge(name, text) for name, text in MODEL_GAUGES.items()}
        self.counters = {name: self._counter(name, text) for name, text in MODEL_COUNTERS.items()}
        self.success = self._counter(
            "request_success", "Number of finished sequences by finish reason.", MODEL, "finished_reason"
        )
        self.histograms: dict[str, Histogram | Summary] = {
            name: Histogram(PREFIX + name, text, (MODEL,), registry=self.registry, buckets=_buckets(bounds, timeout_s))
            for name, (text, bounds) in MODEL_HISTOGRAMS.items()
        }
        for name, text in MODEL_SUMMARIES.items():
            self.histograms[name] = Summary(PREFIX + name, text, (MODEL,), registry=self.registry)
        self._failure = self._counter(
            "request_failure", "Number of failed and rejected calls by error code.", "code", MODEL
        )
        self._calls = self._counter("http_requests", "Number of HTTP responses by route and status.", "route", "status")
        self._key_calls = self._counter(
            "key_requests", "Number of HTTP responses by the label of the API key and status.", "key", "status"
        )
        self._key_tokens = self._counter(
            "key_tokens", "Number of tokens of successful calls by the label of the API key and kind.", "key", "kind"
        )
        self._limits = self._gauge("limit", "Value of each configured limit by the name of its setting.", "setting")
        self._limits_reached = self._counter(
            "limit_reached", "Number of connections, bodies and calls rejected because of a limit, by limit.", "limit"
        )
        for limit in get_args(Limit):  # so that rates are defined from the first rejection on
            self._limits_reached.labels(limit=limit)
        for code in (*ERRORS, CLIENT_GONE):
            self.failures_of("", code)
        self.process_gauges = {
            name: Gauge(PREFIX + name, text, registry=self.registry) for name, text in PROCESS_GAUGES.items()
        }
        build = self._gauge("build_info", "Constant 1 with the version of the service as a label.", "version")
        build.labels(version=version).set(1)
        self.registry.register(LogCollector())
        ProcessCollector(namespace=NAMESPACE, registry=self.registry)

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Set the gauges of configured limits, by the name of the setting."""
        for setting, limit in limits.items():
            self._limits.labels(setting=setting).set(limit)

    def failures_of(self, model: str, code: str) -> Counter:
        """Return the counter of an error code of a model; the model is empty if a call has none."""
        return self._failure.labels(code, model)

    def call_counter(self, route: str, status: int, code: str | None, model: str | None = None) -> Callable[[], None]:
        """Return a function that counts one finished HTTP call.

        `route` is a path template. `code` is None for a success, `model` if none was chosen.
        """
        calls = self._calls.labels(route=route, status=str(status))
        if code is None:
            return calls.inc
        failures = self.failures_of(model or "", code)

        def count() -> None:
            calls.inc()
            failures.inc()

        return count

    def count_key(self, label: str, status: int, details: Mapping[str, Any]) -> None:
        """Count one finished HTTP call of an API key.

        The label is empty if the call had no valid key; `details` may have the numbers of
        `input_tokens` and `output_tokens`.
        """
        self._key_calls.labels(key=label, status=str(status)).inc()
        for kind in ("input", "output"):
            if number := details.get(f"{kind}_tokens"):
                self._key_tokens.labels(key=label, kind=kind).inc(number)

    def count_limit(self, limit: Limit) -> None:
        """Count one connection, body or call that was rejected because of a limit."""
        self._limits_reached.labels(limit=limit).inc()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels or (MODEL,), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels or (MODEL,), registry=self.registry)


Families = Iterable[Metric]
# Gauges of which the service as a whole has the largest value of its workers, not the sum.
LARGEST = frozenset(
    PREFIX + name
    for name in (
        "build_info",
        "limit",
        "models_failed",
        "model_load_seconds",
        "model_weight_bytes",
        "model_state_bytes_per_row",
        "process_start_time_seconds",
        "process_max_fds",
        "process_open_fds",
    )
)
# Settings that the workers share out among them: the values of their gauges add up.
SHARED_SETTINGS = (
    "max_rows",
    "max_state_bytes",
    "max_prefix_cache_bytes",
    "max_response_bytes",
    "max_waiting_sequences",
    "max_waiting_bytes",
    "max_waiting_tokens",
)


Texts = list[str]  # metrics in the Prometheus text format, each with its two lines of description
_SHARED = re.compile(f'setting="({"|".join(SHARED_SETTINGS)})"')
_MODEL = re.compile(rf'{MODEL}="([^"]*)"')


async def texts_of(families: Families) -> Texts:
    """Return metrics as text. Other calls go on between two metrics."""
    texts = []
    for family in families:
        texts.append(generate_latest(OneMetric(family)).decode())
        await asyncio.sleep(0)
    return texts


def sums(texts: Iterable[str]) -> dict[tuple[str, str], float]:
    """Return the values of all metrics of models, by sample and name of the model."""
    samples = chain.from_iterable(_parse(text)[2] for text in texts)
    return {
        (sample.partition("{")[0].removeprefix(PREFIX), match[1]): value
        for sample, value in samples
        if (match := _MODEL.search(sample)) and 'le="' not in sample
    }


def used_models(texts: Iterable[str]) -> set[str]:
    """Return the names of the models that have series."""
    gauge = next(text for text in texts if text.startswith(f"# HELP {PREFIX}num_requests_running"))
    return set(_MODEL.findall(gauge))


def without_gauges(texts: Iterable[str]) -> Texts:
    """Return what is left of metrics after the end of their process."""
    return [text for text in texts if _parse_head(text)[1] != "gauge"]


def merge(pages: Iterable[Iterable[str]]) -> Texts:
    """Return the metrics of several processes as those of one.

    Values are added, except those of `LARGEST`. Samples are kept as lines of text: as objects of
    the library, thousands of them would take much memory for a short time.
    """
    heads: dict[str, str] = {}
    merged: dict[str, dict[str, float]] = {}  # values by metric and sample
    for text in chain.from_iterable(pages):
        name, head, samples = _parse(text)
        heads.setdefault(name, head)
        values = merged.setdefault(name, {})
        is_largest = name in LARGEST
        for sample, value in samples:
            if sample not in values:
                values[sample] = value
            elif is_largest and not _SHARED.search(sample):
                values[sample] = max(values[sample], value)
            else:
                values[sample] += value
    return [
        head + "".join(f"{sample} {_written(value)}\n" for sample, value in merged[name].items())
        for name, head in heads.items()
    ]


def _written(value: float) -> str:
    """Return a number as the library writes it, which takes long for a page of them."""
    return repr(value) if -1e6 < value < 1e6 else str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _parse(text: str) -> tuple[str, str, Iterator[tuple[str, float]]]:
    """Return the name of a metric, its description, and the values of its samples.

    Samples have no timestamps, so that a value follows the last space.
    """
    name, _, length = _parse_head(text)
    lines = (line.rpartition(" ") for line in text[length:].split("\n")[:-1])
    return name, text[:length], ((sample, float(value)) for sample, _, value in lines)


def _parse_head(text: str) -> tuple[str, str, int]:
    """Return the name and the type of a metric, and the length of its description."""
    end = text.index("\n", text.index("\n") + 1)  # of the second line, `# TYPE name type`
    _, name, kind = text[:end].rsplit(" ", 2)
    return name, kind, end + 1


class LogCollector(Collector):
    """Collects the number of log lines that this process has dropped."""

    def collect(self) -> Iterable[Metric]:
        text = "Number of log lines dropped because the reader of the log was too slow or closed."
        yield CounterMetricFamily(f"{PREFIX}log_lines_dropped", text, value=num_dropped_lines())


class OneMetric(Collector):
    """Collector that returns one collected metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


class ModelMetrics(EngineObserver):
    """Metrics of one model, whose series appear with its first use; its engine's observer, too."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        # Returns the series of a counter or a histogram, which is created when it is used.
        self._of: Callable[[str], Any] = cache(
            lambda name: (metrics.counters.get(name) or metrics.histograms[name]).labels(model)
        )
        self._reads: Mapping[str, Callable[[], float]] = {}  # functions of the gauges
        self._is_used = False

    def use(self) -> None:
        """Create the series of a model that a call uses; histograms begin with a first value."""
        if not self._is_used:
            self._is_used = True
            for name in STARTED:
                self._of(name)
            self._metrics.failures_of(self._model, "internal")  # an alert fires on its first one
            self._connect_gauges()

    def observe(self, name: str, value: float) -> None:
        self._of(name).observe(value)

    def _connect_gauges(self) -> None:
        if self._is_used:
            for name, read in self._reads.items():
                self._metrics.gauges[name].labels(self._model).set_function(read)

    def watch(self, engine: Engine, memory: Callable[[], ModelMemory], load_seconds: float) -> None:
        """Connect the gauges to an engine; they are read when metrics are rendered."""
        self._reads = {
            "num_requests_running": lambda: engine.num_running,
            "num_requests_waiting": lambda: engine.num_waiting,
            "model_load_seconds": lambda: load_seconds,
            "model_weight_bytes": lambda: memory().weights,
            "model_state_bytes_per_row": lambda: memory().state_per_row,
            "model_max_state_bytes": lambda: memory().max_state,
            "model_state_bytes": lambda: memory().state_in_use,
            "model_max_prefix_cache_bytes": lambda: memory().max_prefix_cache,
            "model_prefix_cache_bytes": lambda: memory().prefix_cache_in_use,
        }
        self._connect_gauges()

    def unwatch(self) -> None:
        """Set the gauges to 0, because the model is not loaded; release its engine."""
        self._reads = dict.fromkeys(MODEL_GAUGES, lambda: 0)
        self._connect_gauges()

    def on_reload(self) -> None:
        self._of("model_reloads").inc()

    def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
        self.observe("encoder_batch_size", requests)
        self.observe("encoder_batch_seconds", seconds)
        self.observe("batch_padding_ratio", 1 - real_tokens / padded_tokens)

    def on_step(self, rows: int, seconds: float) -> None:
        self.observe("engine_step_seconds", seconds)
        self.observe("batch_size_rows", rows)

    def on_coverage(self, *, has_omissions: bool) -> None:
        self._of("texts_checked").inc()
        self._of("texts_with_omissions").inc(has_omissions)

    def on_prefix_query(self, tokens: int, cached_tokens: int) -> None:
        self._of("prefix_cache_queries").inc(tokens)
        self._of("prefix_cache_hits").inc(cached_tokens)

    def on_finish(self, request: Request, event: Event) -> None:
        if isinstance(event, Generated):
            assert isinstance(request, GenerateRequest)
            num_forced = len(request.target_prefix)
            self._of("generation_tokens").inc(sum(len(target.tokens) - num_forced for target in event.targets))
            self.observe("request_decode_time_seconds", event.timings.decode / 1000)
            self._count_success(len(request.source_ids), event.targets[0].finish_reason, event.timings)
        elif isinstance(event, Encoded):
            assert isinstance(request, EncodeRequest)
            self._count_success(len(request.source_ids), "encoded", event.timings)

    def _count_success(self, num_tokens: int, reason: str, timings: Timings) -> None:
        self._of("prompt_tokens").inc(num_tokens)
        self._metrics.success.labels(self._model, reason).inc()
        self.observe("request_queue_time_seconds", timings.queue / 1000)
        self.observe("request_prefill_time_seconds", timings.encode / 1000)
