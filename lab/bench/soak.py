"""Load all endpoints for half an hour and check that the service's memory, descriptors and threads
do not grow.

Clients call the endpoints in turn, with all models that a service started for the test has loaded.
Texts are one to five sentences drawn at random, so that hardly any occurs twice. One call in eight
is aborted by its client at a random moment. The load pauses several times: all connections are
closed, and once the service is idle and idle models have released memory, the readings are taken.

The first reading is taken before the first call. The growth from there to the mean of the last
readings is compared with the sum of `bounds_mb`. The memory of the service is set so low that the
prefix cache becomes full. Whether memory stays there is a second figure: the growth between the
mean of the readings after the first half and that of the last.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop

from lab.bench.options import Options
from lab.bench.record import Figure, Result, Row
from lab.bench.server import RunningServer, serving
from lab.bench.targets import RELIABILITY
from sightline.base.bundle_files import sha256_of
from sightline.base.text.tokenizer import read_tokenizer
from sightline.loadtest.client import Client, IncompleteResponseError
from sightline.service.discovery import find_bundles
from sightline.service.engine.worker import RELEASE_INTERVAL_S

CLIENTS = 16
READINGS = 30
AVERAGED = 5  # readings in each of the two means; a single reading varies by 10 MB
LEAVING_SHARE = 1 / 8
MAX_ABORT_DELAY_S = 0.08  # before a client aborts its call
MAX_IDLE_WAIT_S = 10.0  # for the service to finish work of aborted calls
SETTLING_S = RELEASE_INTERVAL_S + 1.0  # until connections are closed and idle models have released memory
TIMEOUT_S = 60.0
MEMORY_BYTES = 512 << 20  # of the service; an eighth of it is the bound of the prefix cache
# Memory per worker that is no cache: code of routes, the OpenAPI document, pages and free lists of
# the allocators of C, Python and ONNX Runtime after their first use. Measured: 20 MB after 18
# seconds, 31 MB after four minutes, words of tokenizers included.
WORKING_MB = 30.0
# A tokenizer keeps the tokens of its first 10,000 different words (of at most 256 bytes). Measured
# with words of 3 to 12 letters.
WORDS_MB = 3.0
MAX_CHARACTERS = 600
MAX_TOKENS = 32
LONG_CHARACTERS = 20_000  # long enough to be tokenized in another thread, and rejected as too long
RESIDENT, PREFIXES = "resident memory, MB", "prefix cache, MB"
GROWING = {"resident_mb": RESIDENT, "descriptors": "descriptors", "threads": "threads"}
SEED = 1

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """A request and the expected status of its response; without a body it is a GET request."""

    path: str
    body: Body | None = None
    status: int = 200


@dataclass
class Counts:
    """Numbers of calls so far, by outcome."""

    ended: int = 0  # with the expected status
    refused: int = 0  # with 429 or 503
    left: int = 0  # aborted by the client
    failed: Counter[str] = field(default_factory=Counter)  # with any other outcome, by path and reason


def run(options: Options) -> Result:
    """Load a service; the result lists the failed calls and the growths above their limits."""
    names = [manifest.name for manifest in find_bundles(options.bundles).values()]
    with (
        # /info needs a default model
        serving(options.bundles, default_model=min(names), memory_bytes=MEMORY_BYTES) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        texts = texts_of(options.sentences, options.bundles)
        rows, failed, bounds = runner.run(_load_and_read(server, texts, options))
    half = READINGS // 2 + 1
    figures = {
        f"soak.{name}": Figure.of(
            [_mean(rows[-AVERAGED:], column) - _mean(rows[half : half + AVERAGED], column)],
            "MB" if column == RESIDENT else "",
        )
        for name, column in GROWING.items()
    }
    grown = _mean(rows[-AVERAGED:], RESIDENT) - rows[0][RESIDENT]
    figures["soak.growth_mb"] = Figure.of([grown], "MB")
    figures |= {f"soak.bound.{name}": Figure.of([bound], "MB") for name, bound in bounds.items()}
    figures["soak.beyond_mb"] = Figure.of([grown - sum(bounds.values())], "MB")
    targets = {target.figure: target for target in RELIABILITY}
    grown = [
        f"{targets[name].text} by {figure.value:g} {figure.unit}"
        for name, figure in figures.items()
        if name in targets and not targets[name].is_met(figure)
    ]
    return Result(figures, rows, failures=[*(f"{count} x {reason}" for reason, count in failed.items()), *grown])


def _mean(rows: Sequence[Row], column: str) -> float:
    return fmean(row[column] for row in rows)


async def _load_and_read(
    server: RunningServer, texts: Iterator[str], options: Options
) -> tuple[list[Row], Counter[str], dict[str, float]]:
    async with Client(server.url, TIMEOUT_S) as client:
        cards = json.loads((await client.get("/v1/models")).body)["data"]
    cards = [card for card in cards if card["state"] == "ready"]
    calls, counts, draw = all_calls(cards, texts), Counts(), random.Random(SEED)
    seconds = options.minutes * 60 / READINGS
    rows = [await _reading(server, 0, counts)]
    for number in range(1, READINGS + 1):
        end = time.monotonic() + seconds
        async with Client(server.url, TIMEOUT_S) as client, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(_call_in_turn(client, server.port, calls, end, draw, counts))
        rows.append(await _reading(server, round(seconds * number / 60, 3), counts))
        print(rows[-1], flush=True)
    return rows, counts.failed, await bounds_mb(server, options.bundles)


async def _reading(server: RunningServer, minutes: float, counts: Counts) -> Row:
    await _wait_until_idle(server.url)
    return {
        "minutes": minutes,
        "calls completed": counts.ended,
        "rejected (429 or 503)": counts.refused,
        "aborted by the client": counts.left,
        RESIDENT: round(server.memory_mb("VmRSS"), 1),
        PREFIXES: round(await _gauges_mb(server.url, "model_prefix_cache_bytes"), 1),
        "descriptors": server.num_descriptors(),
        "threads": server.num_threads(),
    }


async def bounds_mb(server: RunningServer, bundles: Path) -> dict[str, float]:
    """Return the bounds of what the service keeps at rest, in all its workers.

    Decoder states and the arena of ONNX Runtime are released at rest, and the series of metrics are
    those of routes, statuses and models. All other caches are filled when the service starts.
    """
    processes = server.num_processes() - 1  # without the supervisor
    tokenizers = {
        sha256_of(folder / file)
        for folder, manifest in find_bundles(bundles).items()
        for file in {manifest.source_tokenizer, manifest.target_tokenizer}
    }
    return {
        "prefixes": await _gauges_mb(server.url, "model_max_prefix_cache_bytes"),
        "words": WORDS_MB * len(tokenizers) * max(1, processes),
        "working": WORKING_MB * max(1, processes),
    }


async def _gauges_mb(url: str, name: str) -> float:
    """Return the sum of a gauge of bytes over all models."""
    async with Client(url, TIMEOUT_S) as client:
        lines = (await client.get("/metrics")).body.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sightline_{name}{{")) / 1e6


def texts_of(sentences: Sequence[str], bundles: Path) -> Iterator[str]:
    """Yield texts of one to five sentences, without end, that fit all models."""
    readers = [
        (read_tokenizer(folder / manifest.source_tokenizer), manifest.limits.max_source_tokens)
        for folder, manifest in find_bundles(bundles).items()
    ]
    draw = random.Random(SEED)
    while True:
        text = " ".join(draw.choices(sentences, k=draw.randint(1, 5)))[:MAX_CHARACTERS]
        while any(len(tokenizer.encode(text)) > most for tokenizer, most in readers):
            text = text[: len(text) // 2]
        yield text


def all_calls(cards: Sequence[Body], texts: Iterable[str]) -> Iterator[Call]:
    """Yield calls to all endpoints in turn, as long as there are texts, which fit every model;
    models and texts change from turn to turn.
    """
    uses: dict[str, Callable[[str, str, int], list[Call]]] = {
        "generate": _generations,
        "attention": _maps,
        "alignment": lambda model, text, number: [
            Call(path, {"model": model, "inputs": text}) for path in ("/v1/align", "/v1/translate")
        ],
        "encode": _encodings,
        "classify": _classifications,
        "rerank": _rankings,
        "tag": lambda model, text, number: [Call("/v1/tag", {"model": model, "inputs": text})],
        "answer": lambda model, text, number: [
            Call("/v1/answer", {"model": model, "question": text[:50], "context": text})
        ],
        "fill-mask": lambda model, text, number: [
            Call("/v1/fill-mask", {"model": model, "inputs": f"{text[:50]} {mask}"}) for mask in ("[MASK]", "<mask>")
        ],
        "sparse": lambda model, text, number: [Call(f"/embed_sparse?model={model}", {"inputs": text[:50]})],
        "chat": _chats,
        "languages": _translations,
    }
    fitting = {use: [card["id"] for card in cards if use in card["tasks"] or card.get(use)] for use in uses}
    for number, text in enumerate(texts):
        for use, models in fitting.items():
            if models:
                yield from uses[use](models[number % len(models)], text, number)
        model = cards[number % len(cards)]["id"]
        yield from _plain(model, text)
        yield from _invalid_calls(model)


def _generations(model: str, text: str, number: int) -> list[Call]:
    own: dict[str, Any] = {"model": model, "inputs": text}
    variants: list[Body] = [
        {},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 50, "seed": number},
        {"stop": ["."], "top_logprobs": 3},
    ]
    short: Body = {"inputs": text, "parameters": {"max_new_tokens": MAX_TOKENS}}
    openai = {"model": model, "prompt": text, "max_tokens": MAX_TOKENS}
    return [
        *(Call("/v1/generate", {**own, "parameters": {"max_new_tokens": 2 * MAX_TOKENS, **more}}) for more in variants),
        Call("/v1/generate", {**own, "inputs": [text[:100]] * 8}),
        Call("/v1/generate", {**own, "stream": True}),
        Call("/v1/score", {**own, "targets": text[:100]}),
        Call("/v1/completions", openai),
        Call("/v1/completions", {**openai, "stream": True}),
        Call("/api/generate", {"model": model, "prompt": text, "options": {"num_predict": MAX_TOKENS}}),
        *(Call(f"{path}?model={model}", short) for path in ("/", "/generate", "/generate_stream")),
        *(Call(f"{path}/infer", {"inputs": [_tensor(text)]}) for path in _paths(model)),
    ]


def _maps(model: str, text: str, number: int) -> list[Call]:
    own: Body = {"model": model, "inputs": text}
    return [Call("/v1/attention", {**own, "reduce": "mean"}), Call("/v1/attention", {**own, "draw": "heatmap"})]


def _encodings(model: str, text: str, number: int) -> list[Call]:
    return [
        Call("/v1/encode", {"model": model, "inputs": text, "pooling": "mean"}),
        *(Call(path, {"model": model, "input": text}) for path in ("/v1/embeddings", "/api/embed")),
        Call("/api/embeddings", {"model": model, "prompt": text}),
        *(Call(f"{path}?model={model}", {"inputs": text}) for path in ("/embed", "/embed_all")),
        Call(f"/similarity?model={model}", {"inputs": {"source_sentence": text, "sentences": [text[:50], text[:80]]}}),
    ]


def _classifications(model: str, text: str, number: int) -> list[Call]:
    return [
        Call("/v1/classify", {"model": model, "inputs": text}),
        Call(f"/predict?model={model}", {"inputs": text}),
    ]


def _rankings(model: str, text: str, number: int) -> list[Call]:
    documents = [text[:50], text[:80]]
    return [
        *(Call(path, {"model": model, "query": text, "documents": documents}) for path in ("/v1/rerank", "/v2/rerank")),
        Call(f"/rerank?model={model}", {"query": text, "texts": documents}),
    ]


def _chats(model: str, text: str, number: int) -> list[Call]:
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text[:100]}]}
    bodies = {
        "/v1/chat/completions": {**chat, "max_tokens": MAX_TOKENS},
        "/v1/responses": {"model": model, "input": text[:100], "max_output_tokens": MAX_TOKENS},
        "/api/chat": {**chat, "options": {"num_predict": MAX_TOKENS}},
    }
    return [
        Call(path, {**body, "stream": is_streamed}) for path, body in bodies.items() for is_streamed in (False, True)
    ]


def _translations(model: str, text: str, number: int) -> list[Call]:
    return [
        Call("/translate", {"q": text, "source": "en", "target": "de", "alternatives": 2}),
        Call("/v2/translate", {"text": [text], "target_lang": "DE"}),
        Call("/language/translate/v2", {"q": text, "target": "de"}),
        Call("/translate/batch", {"from": "en", "to": "de", "texts": [text]}),
        Call("/imme", {"target_lang": "de", "text_list": [text]}),
        *(Call(f"{path}/detect", {"q": text}) for path in ("", "/language/translate/v2")),
        *(Call(path, {}, 415) for path in ("/translate_file", "/v2/document")),  # documents come in forms
        *(Call(f"/v2/document/x{end}", {"document_key": "x"}, 404) for end in ("", "/result")),
        Call("/download_file/x", None, 404),
    ]


def _plain(model: str, text: str) -> list[Call]:
    """Return calls that need no engine."""
    return [
        Call("/v1/tokenize", {"model": model, "inputs": text}),
        Call("/v1/detokenize", {"model": model, "ids": [[5, 6, 7]]}),
        Call("/v2/repository/index", {}),
        Call("/api/show", {"model": model}),
        *map(Call, GETS),
        Call(f"/v1/models/{model}"),
        *(Call(path + name) for path in _paths(model) for name in ("", "/ready", "/config", "/stats")),
    ]


GETS = (
    *("/", "/page/main.js", "/v1/models", "/health", "/health/live", "/health/ready", "/ping", "/metrics"),
    *("/docs", "/docs/docs.js", "/openapi.json"),
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/info", "/languages"),
    *("/v2/languages", "/v2/usage", "/language/translate/v2/languages", "/frontend/settings"),
    *("/v2/glossary-language-pairs", "/v1/glossaries", "/v2/glossaries", "/v3/glossaries"),
    *("/api/tags", "/api/ps", "/api/version"),
)


def _paths(model: str) -> list[str]:
    return [f"/v2/models/{model}", f"/v2/models/{model}/versions/1"]


def _tensor(text: str) -> Body:
    return {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}


def _invalid_calls(model: str) -> list[Call]:
    return [
        Call("/v1/generate", {"model": model, "inputs": ""}, 422),
        Call("/v1/generate", {"model": model, "inputs": "x", "parameters": {"num_beams": -1}}, 422),
        Call("/v1/encode", {"model": model, "inputs": "a " * LONG_CHARACTERS}, 422),
        Call("/v1/generate", {"model": "nobody", "inputs": "x"}, 404),
        Call("/v1/nothing", {}, 404),
        *(Call(f"/v2/repository/models/{model}/{name}", {}, 403) for name in ("load", "unload")),
    ]


async def _call_in_turn(
    client: Client, port: int, calls: Iterator[Call], end: float, draw: random.Random, counts: Counts
) -> None:
    while time.monotonic() < end:
        call = next(calls)
        if call.body is not None and draw.random() < LEAVING_SHARE:
            await _abort(port, client.request(call.path, json.dumps(call.body).encode()), draw)
            counts.left += 1
            continue
        try:
            response = await (client.get(call.path) if call.body is None else _post(client, call.path, call.body))
        except (TimeoutError, IncompleteResponseError, OSError) as error:
            counts.failed[f"{call.path}: {type(error).__name__}: {error}"] += 1
            continue
        if response.status == call.status and b"event: error" not in response.body:
            counts.ended += 1
        elif response.status in (429, 503):
            counts.refused += 1
        else:
            counts.failed[f"{call.path}: {response.status} {response.body[:200]!r}"] += 1


async def _post(client: Client, path: str, body: Body) -> Any:
    return await client.post(path, json.dumps(body).encode())


async def _abort(port: int, request: bytes, draw: random.Random) -> None:
    """Send part of a request or all of it, and close the connection after a short random delay."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request if draw.random() < 0.5 else request[: draw.randrange(len(request))])
        await asyncio.sleep(MAX_ABORT_DELAY_S * draw.random())
        writer.transport.abort()


async def _wait_until_idle(url: str) -> None:
    """Wait until the service is idle and idle models have released their memory. Raises
    `RuntimeError` if it is still busy after MAX_IDLE_WAIT_S.
    """
    end = time.monotonic() + MAX_IDLE_WAIT_S
    while True:
        async with Client(url, TIMEOUT_S) as client:
            metrics = (await client.get("/metrics")).body.decode()
        gauges = ("sightline_num_requests_running{", "sightline_num_requests_waiting{")
        busy = [line for line in metrics.splitlines() if line.startswith(gauges) and float(line.rsplit(" ", 1)[1])]
        if not busy:
            break
        if time.monotonic() > end:
            raise RuntimeError(f"the service is still busy {MAX_IDLE_WAIT_S:g} s after the last call: {busy}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLING_S)
