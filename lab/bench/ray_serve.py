"""Measure the service as one process, with two workers, and in Ray Serve with two replicas.

All three run during the whole measurement, because processes of Ray that are suspended count as
lost. One request has one sentence.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lab.bench.load import GENERATE, bodies_of, measure_load
from lab.bench.options import Options
from lab.bench.record import Figure, Result
from lab.bench.server import free_port, serving, serving_command
from sightline.loadtest.load import Load

CLIENTS = 64
PROCESSES = 2
RAY_PORTS = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT", "FALLBACK_PROXY_GRPC_PORT")


def run(options: Options) -> Result:
    with ExitStack() as stack:
        settings: dict[str, Any] = {"default_model": options.default_model}
        servers = {
            "one process": stack.enter_context(serving(options.bundles, workers=1, **settings)),
            "workers": stack.enter_context(serving(options.bundles, workers=PROCESSES, **settings)),
            "Ray Serve": stack.enter_context(_serving_with_ray(options)),
        }
        load = Load(GENERATE, bodies_of(options.sentences), clients=min(CLIENTS, options.max_clients))
        for server in servers.values():
            measure_load(server.url, replace(load, requests=500))
        rows: list[dict[str, Any]] = []
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(options.rounds):
            for name, server in servers.items():
                before = server.process.cpu_seconds()
                summary = measure_load(server.url, replace(load, duration_s=options.seconds))
                cpu_seconds = server.process.cpu_seconds() - before
                rates[name].append(summary.requests_per_s)
                rows.append(
                    {
                        "server": name,
                        "requests per second": round(rates[name][-1], 1),
                        "CPU ms per request": round(1000 * cpu_seconds / summary.succeeded, 2),
                        "memory MB": round(server.memory_mb("Pss")),
                    }
                )
                print(f"  {rows[-1]}", flush=True)
    return Result({"ray.workers": Figure.of_ratios(rates["Ray Serve"], rates["workers"])}, rows)


def _serving_with_ray(options: Options) -> Any:
    port = free_port()
    values = {
        "bundles": options.bundles,
        "port": port,
        "log_level": "warning",
        "drain_s": 0,
        "workers": PROCESSES,
        "default_model": options.default_model,
    }
    environment = {f"SIGHTLINE_{name.upper()}": str(value) for name, value in values.items()}
    environment |= {f"RAY_SERVE_{name}": str(free_port()) for name in RAY_PORTS}
    return serving_command([sys.executable, "-m", "sightline.service", "--ray"], port, "/health/ready", environment)
