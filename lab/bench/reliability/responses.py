"""Measure large responses in a small container: 200 clients with requests of 1.4 kB and responses
of 11 MB.

The service runs in its own control group with a limit of 1 GiB, which needs root.
"""

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

from lab.bench.load import GENERATE, with_client
from lab.bench.options import Options
from lab.bench.record import Figure, Result
from lab.bench.reliability.limited import limited_memory
from lab.bench.server import serving
from sightline.loadtest.client import Client, IncompleteResponseError

LIMIT_BYTES = 1 << 30
CLIENTS = 200
WORDS = 143  # in the source and in the forced target
SECONDS = 60.0
PAUSE_S = 1.0  # of a client after a rejection, as Retry-After states


def run(options: Options) -> Result:
    text = " ".join(["dog"] * WORDS)
    large = json.dumps({"inputs": text, "targets": text}).encode()
    small = json.dumps({"inputs": options.sentences[0]}).encode()
    statuses: Counter[str] = Counter()
    normal: Counter[str] = Counter()
    with limited_memory(LIMIT_BYTES) as group, contextlib.ExitStack() as stack:
        with group.entered():
            server = stack.enter_context(
                serving(options.bundles, log_level="info", default_model=options.default_model)
            )

        async def send(client: Client, path: str, body: bytes, counts: Counter[str]) -> bool:
            try:
                status = str((await client.post(path, body)).status)
            except (OSError, TimeoutError, IncompleteResponseError) as error:
                status = type(error).__name__
            counts[status] += 1
            return status == "200"

        async def repeat(client: Client, path: str, body: bytes, counts: Counter[str], pause_s: float) -> None:
            loop = asyncio.get_running_loop()
            end = loop.time() + SECONDS
            while loop.time() < end:
                if not await send(client, path, body, counts) or pause_s < PAUSE_S:
                    await asyncio.sleep(pause_s)

        async def work(client: Client) -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CLIENTS):
                    tasks.create_task(repeat(client, "/v1/attention", large, statuses, PAUSE_S))
                tasks.create_task(repeat(client, GENERATE, small, normal, 0.1))

        with_client(server.url, work)
        survived = server.process.exit_code is None
        peak = group.peak_bytes / 1e6
    rows: list[dict[str, Any]] = [
        {"load": f"{CLIENTS} clients, {WORDS} words in and out, all maps", **_sorted(statuses)},
        {"load": "one client with single inputs beside them", **_sorted(normal)},
    ]
    success = 100 * normal["200"] / normal.total()
    return Result(
        {
            "responses.survived": Figure.of([float(survived)], ""),
            "responses.peak": Figure.of([peak], "MB"),
            "responses.normal": Figure.of([success], "%"),
        },
        rows,
    )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
