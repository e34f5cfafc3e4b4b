"""Streams of short sentences, alone and while long texts are encoded and whole batches generated.

Time to first token counts from sending the request; a gap is the time between two events of one stream.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

from bench.load import GENERATE, with_client
from bench.models import Subject
from bench.options import Options
from bench.record import Figure, Result
from bench.server import serving
from loadtest.client import Client
from loadtest.events import parse_events
from loadtest.report import Distribution
from model.data.tokenizer import decode_ids

STREAMS = 4
WORDS = 6  # of a short sentence, at most
LONG_TOKENS = 240
LONG_TEXTS = 16  # with their tokens, nearly one encoder batch
BATCH = 32  # sentences of one call
ENCODE = "/v1/encode"


@dataclass
class _Times:
    """Of all streams together, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def run(options: Options) -> Result:
    streams = [
        json.dumps({"inputs": " ".join(sentence.split()[:WORDS]), "stream": True}).encode()
        for sentence in options.sentences
    ]
    long_text = _long_text(options.models.tiny, options.sentences)
    encode = json.dumps({"inputs": [long_text] * LONG_TEXTS, "pooling": "mean"}).encode()
    busy = {ENCODE: encode, GENERATE: json.dumps({"inputs": list(options.sentences[:BATCH])}).encode()}
    alone, mixed = _Times(), _Times()
    encode_s: list[float] = []

    async def measure(client: Client) -> None:
        await _stream(client, streams, options.seconds / 2, _Times())  # warms it up
        for _ in range(options.rounds):
            started = time.perf_counter()
            await _post(client, ENCODE, encode)
            encode_s.append(time.perf_counter() - started)
            await _stream(client, streams, options.seconds, alone)
            async with _kept_busy(client, busy):
                await _stream(client, streams, options.seconds, mixed)

    with serving(options.models.shipped_alone, threads=options.threads) as server:
        with_client(server.url, measure)
    rows = {"alone": _row(alone), "mixed": _row(mixed)}
    encode_ms = Figure.of([1000 * seconds for seconds in encode_s], "ms")
    figures = {
        "mixed.first_token": Figure.of([rows["mixed"]["first_token_ms"]["p99"]], "ms"),
        "mixed.gap": Figure.of([rows["mixed"]["gap_ms"]["p99"]], "ms"),
        "mixed.encode": encode_ms,
        # How much of one encode a running row waits at the worst.
        "mixed.delay": Figure.of([(rows["mixed"]["gap_ms"]["p99"] - rows["alone"]["gap_ms"]["p50"]) / encode_ms.value]),
    }
    return Result(figures, [{"load": name, **row} for name, row in rows.items()])


def _long_text(subject: Subject, sentences: Sequence[str]) -> str:
    ids = subject.tokenizer.encode(" ".join(sentences)).ids[:LONG_TOKENS]
    return decode_ids(subject.tokenizer, ids)


@contextlib.asynccontextmanager
async def _kept_busy(client: Client, bodies: Mapping[str, bytes]) -> AsyncIterator[None]:
    """Send each body to its path again and again, one at a time."""

    async def again_and_again(path: str, body: bytes) -> None:
        while True:
            await _post(client, path, body)

    tasks = [asyncio.create_task(again_and_again(path, body)) for path, body in bodies.items()]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # it ends by an error alone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _stream(client: Client, bodies: Sequence[bytes], seconds: float, times: _Times) -> None:
    """Keep so many streams open for a while."""
    turns, end = cycle(bodies), time.perf_counter() + seconds

    async def one_after_another() -> None:
        while time.perf_counter() < end:
            started = time.perf_counter()
            answer = await client.post(GENERATE, next(turns))
            arrivals = [event.arrived for event in parse_events(answer.parts)][:-1]  # the last is "[DONE]"
            if answer.status != 200 or not arrivals:
                raise RuntimeError(f"a stream was answered {answer.status}: {answer.body[:300]!r}")
            times.first.append(arrivals[0] - started)
            times.gaps += [later - earlier for earlier, later in pairwise(arrivals)]

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(one_after_another())


async def _post(client: Client, path: str, body: bytes) -> None:
    answer = await client.post(path, body)
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {answer.body[:300]!r}")


def _row(times: _Times) -> dict[str, Any]:
    def percentiles(seconds: Sequence[float]) -> dict[str, float]:
        distribution = Distribution.of_seconds(seconds)
        assert distribution is not None
        return {name: round(getattr(distribution, name), 2) for name in ("p50", "p99", "max")}

    return {
        "streams": len(times.first),
        "first_token_ms": percentiles(times.first),
        "gap_ms": percentiles(times.gaps),
    }
