"""Measure memory of a service with all shipped bundles over thousands of calls of every kind.

Memory of rows is released when a model has had no work for a second. Therefore the largest resident
memory is that of samples without a pause, and growth is measured after pauses.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from lab.bench.load import GENERATE, post, with_client
from lab.bench.options import Options
from lab.bench.record import Figure, Result
from lab.bench.server import serving
from sightline.base.bundle import Manifest
from sightline.loadtest.client import Client
from sightline.service.discovery import find_bundles

CLIENTS = 16
SAMPLES = 10  # evenly spaced
AT_REST = (2, SAMPLES)  # growth is measured between these, after a fifth of the calls and after all
MAX_CHARACTERS = 600  # for these sentences, below the 256 tokens that most shipped models accept
FIELDS = ("VmRSS", "Pss")
CHARACTERS_PER_TOKEN = MAX_CHARACTERS / 256
Call = tuple[str, bytes]


def run(options: Options) -> Result:
    folder = options.bundles
    calls = list(
        itertools.islice(mixed_calls(list(find_bundles(folder).values()), options.sentences), options.requests)
    )
    part = max(1, len(calls) // SAMPLES)
    rows: list[dict[str, float]] = []
    at_rest: list[float] = []

    def sample(done: int) -> None:
        rows.append({"requests": done, **{f"{name} MB": round(server.memory_mb(name), 1) for name in FIELDS}})

    async def send(client: Client) -> None:
        sample(0)
        for number in range(1, SAMPLES + 1):
            await send_all(client, calls[part * (number - 1) : part * number])
            sample(part * number)
            if number in AT_REST:
                await asyncio.sleep(options.seconds)
                at_rest.append(server.memory_mb("VmRSS"))

    with serving(folder, log_level="info") as server:
        with_client(server.url, send)
    shared_once = [row["Pss MB"] for row in rows]
    figures = {
        "memory.ready": shared_once[0],
        "memory.loaded": max(shared_once),
        "memory.growth": at_rest[1] - at_rest[0],
    }
    return Result({name: Figure.of([mb], "MB") for name, mb in figures.items()}, rows)


def mixed_calls(manifests: Sequence[Manifest], sentences: Sequence[str]) -> Iterator[Call]:
    """Yield calls without end: each kind and model in turn, with all sentences and several lengths.

    Models that load on their first use are left out: a service may have any number of them. The
    longest texts are close to the model's limit, and some calls have several inputs.
    """
    loaded = [manifest for manifest in manifests if not manifest.lazy]
    for number, sentence in enumerate(itertools.cycle(sentences)):
        text = " ".join([sentence] * (1 + number % 5))
        for manifest in loaded:
            short = text[: int(min(MAX_CHARACTERS, manifest.limits.max_source_tokens * CHARACTERS_PER_TOKEN))].strip()
            for path, body in _kinds(manifest, short, number):
                yield path, json.dumps(body).encode()


def _kinds(manifest: Manifest, text: str, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    model, tasks = {"model": manifest.name}, manifest.tasks
    few = [text] * (1 + number % 4)
    if "generate" in tasks:
        for parameters in ({}, {"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True, "seed": number}):
            yield GENERATE, {**model, "inputs": few, "parameters": parameters}
        yield GENERATE, {**model, "inputs": text, "stream": True}
        yield "/v1/score", {**model, "inputs": text[: len(text) // 2], "targets": text[: len(text) // 2]}
        yield "/v1/completions", {**model, "prompt": text}
    if manifest.chat is not None:
        yield "/v1/chat/completions", {**model, "messages": [{"role": "user", "content": text}]}
    if manifest.languages is not None:
        languages = {"source": manifest.languages.source, "target": manifest.languages.target}
        yield "/translate", {"q": text, **languages}
    if "attention" in tasks:
        yield "/v1/attention", {**model, "inputs": text, "reduce": "mean"}
    if "classify" in tasks:
        yield "/v1/classify", {**model, "inputs": few}
        yield f"/predict?model={manifest.name}", {"inputs": text}
    yield "/v1/encode", {**model, "inputs": few, "pooling": "mean"}
    yield "/v1/embeddings", {**model, "input": few}
    yield f"/embed?model={manifest.name}", {"inputs": text}
    yield "/v1/tokenize", {**model, "inputs": few}


async def send_all(client: Client, calls: Sequence[Call]) -> None:
    """Send all calls from several clients, each with one call at a time."""
    turns = iter(calls)

    async def one_after_another() -> None:
        for path, body in turns:
            await post(client, path, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(one_after_another())
