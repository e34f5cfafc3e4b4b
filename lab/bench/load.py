"""Run loads from this process with the client of the load test."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import uvloop

from sightline.loadtest.client import Client
from sightline.loadtest.load import Load, run_load
from sightline.loadtest.load_report import Summary, summarize

GENERATE = "/v1/generate"
TIMEOUT_S = 120
Answer = TypeVar("Answer")


def with_client(
    url: str, work: Callable[[Client], Awaitable[Answer]], reuses_connections: bool = True, key: str = ""
) -> Answer:
    """Run `work` with a new client on a new event loop and return its result."""

    async def run() -> Answer:
        async with Client(url, TIMEOUT_S, reuses_connections, key) as client:
            return await work(client)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def post(client: Client, path: str, body: bytes) -> None:
    """Post a body. Raises `RuntimeError` if the status of the response is not 200."""
    response = await client.post(path, body)
    if response.status != 200:
        raise RuntimeError(f"{path} failed with status {response.status}: {response.body[:300]!r}")


def measure_load(url: str, load: Load) -> Summary:
    """Run a load; streams have a connection each, because llama.cpp closes theirs. Raises
    `RuntimeError` for failures besides rejections (429 or 503).
    """

    async def work(client: Client) -> Summary:
        return summarize(await run_load(client, load))

    summary = with_client(url, work, reuses_connections=not load.is_streamed)
    if summary.failed:
        raise RuntimeError(f"{sum(summary.failed.values())} of {summary.sent} requests failed: {dict(summary.failed)}")
    return summary


def bodies_of(inputs: Iterable[str | list[str]], **parameters: Any) -> list[bytes]:
    return [json.dumps({"inputs": texts, "parameters": parameters}).encode() for texts in inputs]
