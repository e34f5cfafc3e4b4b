"""Loads on a server from this process, by the load test's client."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import uvloop

from loadtest.client import Client
from loadtest.load import Load, run_load
from loadtest.report import Summary, summarize

GENERATE = "/v1/generate"
TIMEOUT_S = 120
Answer = TypeVar("Answer")


def with_client(url: str, work: Callable[[Client], Awaitable[Answer]]) -> Answer:
    """Run `work` with a client of its own on an event loop of its own."""

    async def run() -> Answer:
        async with Client(url, TIMEOUT_S) as client:
            return await work(client)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def measure_load(url: str, load: Load) -> Summary:
    """Raises RuntimeError where an answer is neither a success nor a refusal."""

    async def work(client: Client) -> Summary:
        return summarize(await run_load(client, load))

    summary = with_client(url, work)
    if summary.failed:
        raise RuntimeError(f"{sum(summary.failed.values())} of {summary.sent} requests failed: {dict(summary.failed)}")
    return summary


def bodies_of(sentences: Sequence[str], **parameters: Any) -> list[bytes]:
    return [json.dumps({"inputs": sentence, "parameters": parameters}).encode() for sentence in sentences]
