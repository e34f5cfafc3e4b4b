"""Measure the CPU time of calls that are traced, over that of calls without a collector."""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

from lab.bench.load import GENERATE, bodies_of, measure_load
from lab.bench.options import Options
from lab.bench.record import Figure, Result
from lab.bench.server import RunningServer, serving
from sightline.loadtest.load import Load

SAMPLING = {"none": None, "10 %": 0.1, "all": 1.0}  # fraction of the calls that are traced
CLIENTS = 16


def run(options: Options) -> Result:
    load = Load(GENERATE, bodies_of(options.sentences), clients=CLIENTS, duration_s=options.seconds)
    cpu_ms: dict[str, list[float]] = {name: [] for name in SAMPLING}
    with _collector() as endpoint, contextlib.ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        for name, sampling in SAMPLING.items():
            sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(sampling)}
            traced = {} if sampling is None else {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **sampler}
            with mock.patch.dict(os.environ, traced):
                served = serving(options.bundles, log_level="info", default_model=options.default_model)
                servers[name] = server = stack.enter_context(served)
            measure_load(server.url, replace(load, duration_s=options.seconds / 2))
            server.process.suspend()
        for _ in range(options.rounds):
            for name, server in servers.items():
                with server.process.running():
                    before = server.process.cpu_seconds()
                    summary = measure_load(server.url, load)
                    cpu_ms[name].append(1000 * (server.process.cpu_seconds() - before) / summary.succeeded)
    figures = {f"traces.{name}": Figure.of_ratios(cpu_ms[name], cpu_ms["none"]) for name in SAMPLING if name != "none"}
    rows = [{"traced": name, "CPU ms a call": Figure.of(values).value} for name, values in cpu_ms.items()]
    return Result(figures, rows)


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Yield the URL of a collector that accepts everything."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
