"""Traces of calls, which a collector of OpenTelemetry receives (extra `traces`).

A call has one span of the server and one for each of its phases. Spans are created from the times
that every call records, so that a service without a collector does nothing for them.
"""

import functools
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sightline import __version__
from sightline.base.errors import UsageError
from sightline.base.extras import install_command
from sightline.service.logs import FIELDS

if TYPE_CHECKING:
    from opentelemetry.trace import Span

# Names of OpenTelemetry's conventions for generative AI; other tasks have their own names.
OPERATIONS = {"generate": "text_completion", "encode": "embeddings"}
# Parameters of a generation, with their names there. Those with texts are left out.
PARAMETERS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "num_return_sequences": "choice.count",
}
# OpenTelemetry's variables with the URL of a collector.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PATH = "/v1/traces"  # after the second of them, which names a collector of all signals
SHUTDOWN_TIMEOUT_S = 2.0  # time in which the last spans must be sent


class Traces:
    """Creates the spans of calls and sends them to a collector, in a thread of its own.

    OpenTelemetry reads its settings from variables of the environment: `OTEL_TRACES_SAMPLER`,
    `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_HEADERS` and others of the
    exporter and the batches.
    """

    def __init__(self) -> None:
        """Start to send spans."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = Resource.create({"service.name": "sightline", "service.version": __version__})
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        url = traces_endpoint()
        self._exporter = OTLPSpanExporter(endpoint=url)
        # The lines of the library do not name the collector that cannot be reached.
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(functools.partial(_add_url, _shown(url)))
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("sightline", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Iterable[tuple[bytes, bytes]], started: float) -> "Span":
        """Return the span of a call that began at `started` (`time.monotonic`).

        The headers may name a span of the client; `tracestate` may have several lines.
        """
        from opentelemetry.trace import SpanKind

        carrier: dict[str, list[str]] = {}
        for key, value in headers:
            if key in (b"traceparent", b"tracestate"):
                carrier.setdefault(key.decode(), []).append(value.decode("latin-1"))
        context = self._propagator.extract(carrier)
        return self._tracer.start_span(name, context, SpanKind.SERVER, start_time=_epoch_ns(started))

    def end(
        self,
        span: "Span",
        attributes: Mapping[str, str | int | Sequence[str] | None],
        error: str | None,
        phases: Mapping[str, float],
        finished: float,
    ) -> None:
        """End the span of a call and create those of its phases.

        None leaves an attribute out. `error` is an error code if the service failed. `phases` are
        milliseconds, in order; the last one ended at `finished` (`time.monotonic`).
        """
        from opentelemetry.trace import StatusCode, set_span_in_context

        if not span.is_recording():
            return
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if error is not None:
            span.set_status(StatusCode.ERROR, error)
        context, ended = set_span_in_context(span), _epoch_ns(finished)
        for name, milliseconds in reversed(list(phases.items())):
            if milliseconds:
                began = ended - round(1e6 * milliseconds)
                self._tracer.start_span(name, context, start_time=began).end(ended)
                ended = began
        span.end()

    def shutdown(self) -> None:
        """Send the spans that are left; `stop_sending` ends it early."""
        self._provider.shutdown()

    def stop_sending(self) -> None:
        """Give up spans that the collector has not taken."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def traces_endpoint() -> str | None:
    """Return the URL that takes spans, from OpenTelemetry's variables; None if there is none."""
    name = _endpoint_variable()
    url = os.environ.get(name, "")
    if name != ENDPOINTS[1]:
        return url or None
    return url.rstrip("/").removesuffix(PATH) + PATH


def _endpoint_variable() -> str:
    """Return the variable that names the collector, or one that is not set."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return "" if is_disabled else next((name for name in ENDPOINTS if os.environ.get(name)), "")


def _add_url(fields: Mapping[str, str], line: logging.LogRecord) -> bool:
    setattr(line, FIELDS, fields)
    return True


def _shown(url: str | None) -> dict[str, str]:
    """Return the fields of a log line about a collector, without the credentials in its URL."""
    parts = urlsplit(url or "")
    return {"url": parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()}


def check_traces() -> None:
    """Check that spans can be sent to the collector, if there is one.

    Raises `UsageError` if the URL is not valid, or the extra is not installed.
    """
    endpoint = traces_endpoint()
    if endpoint is None:
        return
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise UsageError(f"{_endpoint_variable()} must be a URL that begins with http:// or https://")
    if find_spec("opentelemetry.sdk") is None or find_spec("opentelemetry.exporter") is None:
        variable, command = _endpoint_variable(), install_command("cpu,traces")
        raise UsageError(f"{variable} is set, but traces need OpenTelemetry: {command}; or unset the variable")


def traceresponse(span: "Span") -> bytes:
    """Return the header that tells the client the ids of its trace and of the call's span."""
    context: Any = span.get_span_context()
    return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)


def trace_id(span: "Span") -> str:
    return f"{span.get_span_context().trace_id:032x}"


def _epoch_ns(at: float) -> int:
    """Return the time of day, in nanoseconds, of a time of `time.monotonic`."""
    return time.time_ns() - round(1e9 * (time.monotonic() - at))
