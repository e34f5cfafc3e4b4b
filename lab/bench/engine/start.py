"""Measure the time until ready, the first request over the tenth, and memory after a load."""

import time

from lab.bench.load import GENERATE, bodies_of, measure_load, with_client
from lab.bench.options import Options
from lab.bench.record import Figure, Result
from lab.bench.server import serving
from sightline.loadtest.client import Client
from sightline.loadtest.load import Load

ROWS = 32
REQUESTS = 2000


def run(options: Options) -> Result:
    bundles = options.models.shipped.served("shipped")
    body = bodies_of(options.sentences)[0]

    async def ten_latencies(client: Client) -> list[float]:
        latencies = []
        for _ in range(10):
            started = time.perf_counter()
            await client.post(GENERATE, body)
            latencies.append(time.perf_counter() - started)
        return latencies

    ready: list[float] = []
    ratios: list[float] = []
    for _ in range(options.rounds):
        with serving(bundles, log_level="info") as server:
            ready.append(server.seconds_to_ready)
            latencies = with_client(server.url, ten_latencies)
            ratios.append(latencies[0] / latencies[9])
    with serving(bundles, max_rows=ROWS, workers=1) as server:
        measure_load(server.url, Load(GENERATE, bodies_of(options.sentences), clients=ROWS, requests=REQUESTS))
        resident = server.memory_mb("VmRSS")
    return Result(
        {
            "start.ready": Figure.of(ready, "s"),
            "start.first": Figure.of(ratios),
            "start.resident": Figure.of([resident], "MB"),
        }
    )
