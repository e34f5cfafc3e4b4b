"""Compare sequential requests with the same requests sent at once, as many as there are rows."""

import asyncio
import time
from collections.abc import Sequence

from bench.load import GENERATE, bodies_of, with_client
from bench.models import Subject
from bench.options import Options
from bench.record import Figure, Result
from bench.server import serving
from loadtest.client import Client

ROWS = 32
FIXED_LENGTH = {"max_new_tokens": 20, "min_new_tokens": 20}  # random weights do not end sentences


def run_tiny(options: Options) -> Result:
    sentences = options.sentences[: min(ROWS, options.max_rows)]
    return _run(options, options.models.tiny, bodies_of(sentences))


def run_base(options: Options) -> Result:
    sentences = options.sentences[: min(ROWS, options.max_rows)]
    return _run(options, options.models.random_base, bodies_of(sentences, **FIXED_LENGTH))


def _run(options: Options, subject: Subject, bodies: Sequence[bytes]) -> Result:
    async def ratios(client: Client) -> list[float]:
        await asyncio.gather(*(client.post(GENERATE, body) for body in bodies))  # opens the connections
        return [await _seconds_in_turn(client, bodies) / await _seconds_at_once(client, bodies) for _ in rounds]

    rounds = range(options.rounds)
    with serving(subject.bundles["float32"].parent, max_rows=ROWS) as server:
        return Result({f"batching.{subject.name}": Figure.of(with_client(server.url, ratios))})


async def _seconds_in_turn(client: Client, bodies: Sequence[bytes]) -> float:
    started = time.perf_counter()
    for body in bodies:
        await client.post(GENERATE, body)
    return time.perf_counter() - started


async def _seconds_at_once(client: Client, bodies: Sequence[bytes]) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(client.post(GENERATE, body) for body in bodies))
    return time.perf_counter() - started
