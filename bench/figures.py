"""The figures of one service on one machine: start, memory, batching, and what attention maps cost.

Every comparison is a ratio of two things measured in turn in the same run; a figure is the median of its rounds.
"""

import asyncio
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.server import serving
from loadtest.client import Client
from loadtest.load import Load, run_load
from loadtest.outcome import Success
from service.bundle import read_bundle
from service.cpu import usable_threads
from service.engine.engine import Engine
from service.engine.request import DecodingParameters, GenerateRequest
from service.runtime.ort import OnnxRunner
from service.tokenizer import read_tokenizer

ROWS = 32
GENERATE = "/v1/generate"


@dataclass(frozen=True)
class Figure:
    """A number, what it must be, and the numbers that it is the median of."""

    name: str
    value: float
    unit: str
    bar: float
    better: Literal["lower", "higher"]
    rounds: list[float]

    @property
    def is_met(self) -> bool:
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def _figure(name: str, unit: str, bar: float, better: Literal["lower", "higher"], rounds: Sequence[float]) -> Figure:
    return Figure(name, statistics.median(rounds), unit, bar, better, [round(value, 4) for value in rounds])


def _body(sentence: str, **fields: Any) -> bytes:
    return json.dumps({"inputs": sentence, **fields}).encode()


async def _latency_s(client: Client, body: bytes) -> float:
    started = time.perf_counter()
    answer = await client.post(GENERATE, body)
    if answer.status != 200:
        raise RuntimeError(f"the service answered {answer.status}: {answer.body[:300]!r}")
    return time.perf_counter() - started


def measure_start(bundles: Path, sentences: Sequence[str], rounds: int) -> list[Figure]:
    """Exec to ready, and the first request beside the tenth; a new process each round."""
    ready: list[float] = []
    ratios: list[float] = []

    async def ten_requests(url: str) -> list[float]:
        async with Client(url, timeout_s=30) as client:
            return [await _latency_s(client, _body(sentences[0])) for _ in range(10)]

    for _ in range(rounds):
        with serving(bundles) as server:
            ready.append(server.seconds_to_ready)
            latencies = asyncio.run(ten_requests(server.url))
            ratios.append(latencies[0] / latencies[9])
    return [
        _figure("from exec to the first 200 of /health/ready", "s", 2.0, "lower", ready),
        _figure("the first request over the tenth", "x", 1.5, "lower", ratios),
    ]


def measure_memory(bundles: Path, sentences: Sequence[str], requests: int = 2000) -> list[Figure]:
    """Resident memory after many requests, as many at once as there are rows."""

    async def load(url: str) -> None:
        bodies = [_body(sentence) for sentence in sentences]
        async with Client(url, timeout_s=60) as client:
            done = await run_load(client, Load(GENERATE, bodies, clients=ROWS, requests=requests))
        failed = [outcome for outcome in done.outcomes if not isinstance(outcome, Success)]
        if failed:
            raise RuntimeError(f"{len(failed)} of {requests} requests failed: {failed[0]}")

    with serving(bundles, max_rows=ROWS) as server:
        asyncio.run(load(server.url))
        resident = server.resident_mb()
    return [_figure(f"VmRSS after {requests} requests at {ROWS} rows", "MB", 250, "lower", [resident])]


def measure_batching(
    name: str, bar: float, bundles: Path, sentences: Sequence[str], rounds: int, **parameters: Any
) -> list[Figure]:
    """As many requests as there are rows, one after another and all at once, in turn."""
    bodies = [_body(sentence, parameters=parameters) for sentence in itertools.islice(sentences, ROWS)]

    async def both(url: str) -> list[float]:
        async with Client(url, timeout_s=300) as client:
            await asyncio.gather(*(_latency_s(client, body) for body in bodies))  # opens the connections
            ratios = []
            for _ in range(rounds):
                started = time.perf_counter()
                for body in bodies:
                    await _latency_s(client, body)
                in_turn = time.perf_counter() - started
                started = time.perf_counter()
                await asyncio.gather(*(_latency_s(client, body) for body in bodies))
                ratios.append(in_turn / (time.perf_counter() - started))
            return ratios

    with serving(bundles, max_rows=ROWS) as server:
        ratios = asyncio.run(both(server.url))
    return [_figure(f"{ROWS} requests at once over one after another, {name}", "x", bar, "higher", ratios)]


def measure_maps(bundle: Path, sentences: Sequence[str], rounds: int) -> list[Figure]:
    """Time per engine step with every attention map asked for over the time with none, in turn, the same tokens."""
    manifest = read_bundle(bundle)
    tokenizer = read_tokenizer(bundle / manifest.source_tokenizer)
    sources = [tuple(tokenizer.encode(sentence)) for sentence in sentences]
    engine = Engine(OnnxRunner(bundle, manifest, num_threads=usable_threads(), max_rows=ROWS))
    kinds = frozenset(attention.kind for attention in manifest.attention)

    def seconds_a_step(rows: int, attention: frozenset[str]) -> float:
        for source in sources[:rows]:
            request = GenerateRequest(
                "bench", source, math.inf, DecodingParameters(max_new_tokens=24, min_new_tokens=24), attention=attention
            )
            engine.submit(request, lambda event: None)
        while engine.num_waiting:  # encoding is left out
            engine.step()
        steps, started = 0, time.perf_counter()
        while engine.has_work:
            engine.step()
            steps += 1
        return (time.perf_counter() - started) / steps

    def ratios(rows: int) -> list[float]:
        seconds_a_step(rows, kinds), seconds_a_step(rows, frozenset())
        return [seconds_a_step(rows, kinds) / seconds_a_step(rows, frozenset()) for _ in range(rounds)]

    return [
        _figure(f"a step with all attention maps over one without, {rows} rows", "x", 1.15, "lower", ratios(rows))
        for rows in (1, 8, ROWS)
    ]
