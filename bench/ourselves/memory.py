"""Resident memory of a service over thousands of requests of every kind."""

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from bench.load import GENERATE, with_client
from bench.options import Options
from bench.record import Figure, Result
from bench.server import RunningServer, serving
from loadtest.client import Client

CLIENTS = 16
SAMPLES = 10  # of memory, evenly over the requests; growth counts from the second, which is after a fifth of them
MAX_CHARACTERS = 600  # within 256 tokens of the shipped model on these sentences
Request = tuple[str, bytes]


def run(options: Options) -> Result:
    requests = list(itertools.islice(_requests(options.sentences), options.requests))
    part = max(1, len(requests) // SAMPLES)
    resident: list[float] = []

    def sample_after_each_part(server: RunningServer) -> None:
        async def send(client: Client) -> None:
            for first in range(0, part * SAMPLES, part):
                await _send_all(client, requests[first : first + part])
                resident.append(server.resident_mb())

        with_client(server.url, send)

    with serving(options.models.shipped_alone, threads=options.threads) as server:
        sample_after_each_part(server)
    rows = [{"requests": part * number, "resident_mb": round(mb, 1)} for number, mb in enumerate(resident, 1)]
    return Result({"memory.growth": Figure.of([resident[-1] - resident[1]], "MB")}, rows)


def _requests(sentences: Sequence[str]) -> Iterator[Request]:
    """Each kind in turn, over all sentences and several lengths, the longest about as long as the model reads."""
    for number, sentence in enumerate(itertools.cycle(sentences)):
        text = " ".join([sentence] * (1 + number % 5))[:MAX_CHARACTERS]
        for path, body in _kinds(text, number):
            yield path, json.dumps(body).encode()


def _kinds(text: str, number: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        (GENERATE, {"inputs": text}),
        (GENERATE, {"inputs": text, "parameters": {"num_beams": 4, "num_return_sequences": 2}}),
        (GENERATE, {"inputs": text, "parameters": {"do_sample": True, "top_k": 50, "seed": number}}),
        (GENERATE, {"inputs": text, "parameters": {"return_attention": {"kinds": ["cross"], "reduce": "mean"}}}),
        (GENERATE, {"inputs": text, "stream": True}),
        ("/v1/attention", {"input": text, "reduce": "mean"}),
        ("/v1/score", {"inputs": text, "targets": text}),
        ("/v1/encode", {"inputs": text, "pooling": "mean"}),
    ]


async def _send_all(client: Client, requests: Sequence[Request]) -> None:
    """So many clients, each with one request at a time."""
    turns = iter(requests)

    async def one_after_another() -> None:
        for path, body in turns:
            answer = await client.post(path, body)
            if answer.status != 200:
                raise RuntimeError(f"{path} answered {answer.status}: {answer.body[:300]!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one_after_another())
