"""Measure streams of short sentences, alone and while long texts and batches are processed.

Time to first token counts from sending the request. A gap is the time between two events of one
stream.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

from lab.bench.load import GENERATE, post, with_client
from lab.bench.models import Subject
from lab.bench.options import Options
from lab.bench.record import Figure, Result
from lab.bench.server import serving
from sightline.loadtest.client import Client
from sightline.loadtest.events import parse_events
from sightline.loadtest.load_report import Distribution
from sightline.model.data.tokenizer_training import decode_ids

STREAMS = 4
WORDS = 6  # maximum length of a short sentence
LONG_TOKENS = 240
LONG_TEXTS = 16  # together, their tokens nearly fill one encoder batch
BATCH = 32  # sentences per batch call
ENCODE = "/v1/encode"


@dataclass
class _Times:
    """Times of all streams, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def run(options: Options) -> Result:
    streams = [
        json.dumps({"inputs": " ".join(sentence.split()[:WORDS]), "stream": True}).encode()
        for sentence in options.sentences
    ]
    long_text = _long_text(options.models.shipped, options.sentences)
    encode = json.dumps({"inputs": [long_text] * LONG_TEXTS, "pooling": "mean"}).encode()
    busy = {ENCODE: encode, GENERATE: json.dumps({"inputs": list(options.sentences[:BATCH])}).encode()}
    alone, mixed = _Times(), _Times()
    encode_s: list[float] = []

    async def measure(client: Client) -> None:
        await _stream(client, streams, options.seconds / 2, _Times())  # warm-up
        for _ in range(options.rounds):
            started = time.perf_counter()
            await post(client, ENCODE, encode)
            encode_s.append(time.perf_counter() - started)
            await _stream(client, streams, options.seconds, alone)
            async with _background_load(client, busy):
                await _stream(client, streams, options.seconds, mixed)

    with serving(options.models.shipped.served("shipped"), log_level="info") as server:
        with_client(server.url, measure)
    rows = {"alone": _row(alone), "mixed": _row(mixed)}
    encode_ms = Figure.of([1000 * seconds for seconds in encode_s], "ms")
    figures = {
        "mixed.first_token": Figure.of([rows["mixed"]["first token ms"]["p99"]], "ms"),
        "mixed.gap": Figure.of([rows["mixed"]["gap ms"]["p99"]], "ms"),
        "mixed.encode": encode_ms,
        # The longest delay of a running row, relative to one encode.
        "mixed.delay": Figure.of([(rows["mixed"]["gap ms"]["p99"] - rows["alone"]["gap ms"]["p50"]) / encode_ms.value]),
    }
    return Result(figures, [{"load": name, **row} for name, row in rows.items()])


def _long_text(subject: Subject, sentences: Sequence[str]) -> str:
    ids = subject.tokenizer.encode(" ".join(sentences)).ids[:LONG_TOKENS]
    return decode_ids(subject.tokenizer, ids)


@contextlib.asynccontextmanager
async def _background_load(client: Client, bodies: Mapping[str, bytes]) -> AsyncIterator[None]:
    """Send each body to its path repeatedly, one at a time, while the block runs."""

    async def repeat(path: str, body: bytes) -> None:
        while True:
            await post(client, path, body)

    tasks = [asyncio.create_task(repeat(path, body)) for path, body in bodies.items()]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # raises: the task only ends with an error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _stream(client: Client, bodies: Sequence[bytes], seconds: float, times: _Times) -> None:
    """Keep STREAMS streams open for the given time."""
    turns, end = cycle(bodies), time.perf_counter() + seconds

    async def one_after_another() -> None:
        while time.perf_counter() < end:
            started = time.perf_counter()
            response = await client.post(GENERATE, next(turns))
            arrivals = [event.arrived for event in parse_events(response.parts)][:-1]  # the last is "[DONE]"
            if response.status != 200 or not arrivals:
                raise RuntimeError(f"a stream failed with status {response.status}: {response.body[:300]!r}")
            times.first.append(arrivals[0] - started)
            times.gaps += [later - earlier for earlier, later in pairwise(arrivals)]

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(one_after_another())


def _row(times: _Times) -> dict[str, Any]:
    def percentiles(seconds: Sequence[float]) -> dict[str, float]:
        distribution = Distribution.of_seconds(seconds)
        assert distribution is not None
        return {name: round(getattr(distribution, name), 2) for name in ("p50", "p99")}

    return {
        "streams": len(times.first),
        "first token ms": percentiles(times.first),
        "gap ms": percentiles(times.gaps),
    }
