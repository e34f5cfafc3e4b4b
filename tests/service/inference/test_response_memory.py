"""Memory of responses is reserved before a call runs and held until its client is done."""

import asyncio
import threading
import time
from typing import Any

import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.inference.admission import ResponseMemory, ResponseReservation
from tests.service.conftest import (
    FakeBackend,
    MakeBackend,
    Running,
    Serve,
    Start,
    byte_level_tokenizer,
    classifying,
    until,
    wait_until,
)
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio

LONG = "x" * 60
# A forced target of 61 tokens over a source of 61: some 29,000 numbers of all kinds, layers and
# heads.
FORCED = {"inputs": LONG, "targets": LONG}
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/attention", FORCED),
    ("/v1/attention", {**FORCED, "encoding": "base64"}),
    ("/v1/attention", {"inputs": [LONG] * 4, "targets": [LONG] * 4}),
    ("/v1/attention", {"model": "judge", "inputs": [LONG] * 4}),
    ("/v1/attention", {"inputs": LONG, "parameters": {"min_new_tokens": 60}}),
    (
        "/v1/generate",
        {"inputs": [LONG] * 4, "parameters": {"num_beams": 3, "num_return_sequences": 3, "return_attention": True}},
    ),
    ("/v1/generate", {"inputs": [LONG] * 4, "parameters": {"min_new_tokens": 60, "top_logprobs": 5}}),
    ("/v1/score", {"inputs": [LONG] * 8, "targets": [LONG] * 8, "top_logprobs": 5}),
    ("/v1/align", {"inputs": [LONG] * 8, "targets": [LONG] * 8}),
    ("/v1/attention", {**FORCED, "units": "words", "statistics": True}),
    ("/v1/encode", {"inputs": [LONG] * 8, "pooling": "none"}),
    ("/v1/encode", {"inputs": [LONG] * 8, "pooling": "none", "encoding": "base64"}),
    ("/v1/classify", {"model": "judge", "inputs": [LONG] * 4, "return_attention": True}),
    ("/v1/tokenize", {"inputs": [LONG] * 32}),
]


def memory_of(running: Running) -> ResponseMemory:
    memory: ResponseMemory = running.app.state.service.response_memory
    return memory


@pytest.mark.parametrize(("path", "body"), LARGE)
async def test_a_call_reserves_at_least_its_response_and_releases_it(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Regression: responses were not counted, and many small requests exhausted the memory."""
    reserved: list[int] = []
    release = ResponseReservation.release
    async with start(classifying(make_backend())) as running:

        def note(reservation: ResponseReservation) -> None:  # the response has been sent
            reserved.append(memory_of(running).num_bytes)
            release(reservation)

        monkeypatch.setattr(ResponseReservation, "release", note)
        response = await running.post(path, {"model": "fake", **body})
        assert response.status_code == 200
        assert reserved[0] >= len(response.content)
        assert memory_of(running).num_bytes == 0


async def test_responses_that_do_not_fit_together_are_rejected_and_fit_one_after_another(
    start: Start, make_backend: MakeBackend
) -> None:
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), max_response_bytes=1_000_000) as running:
        first = asyncio.ensure_future(running.post("/v1/attention", FORCED))
        await until(lambda: running.backend.num_busy == 1)
        rejected = await running.post("/v1/attention", FORCED)
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "overloaded")
        assert "an eighth of SIGHTLINE_MEMORY_BYTES" in rejected.text
        assert rejected.headers["retry-after"]
        small = asyncio.ensure_future(running.post("/v1/generate", {"inputs": "x"}))
        await until(lambda: running.backend.num_busy == 2)
        hang.set()
        assert (await first).status_code == (await small).status_code == 200
        assert (await running.post("/v1/attention", FORCED)).status_code == 200


async def test_maps_that_exceed_the_memory_end_only_their_call(start: Start, make_backend: MakeBackend) -> None:
    """Only the first map rows of a generation are reserved; others are added in each step."""
    async with start(make_backend(step_s=0.001), max_response_bytes=600_000) as running:
        body = {"inputs": LONG, "parameters": {"min_new_tokens": 2, "suppress_tokens": [2], "return_attention": True}}
        responses = await asyncio.gather(
            *(running.post("/v1/generate", body) for _ in range(2)), running.post("/v1/generate", {"inputs": "x"})
        )
        codes = [response.status_code for response in responses]
        assert sorted(codes[:2]) in ([200, 429], [429, 429])
        assert codes[2] == 200
        rejected = next(response for response in responses if response.status_code == 429)
        assert rejected.json()["error"]["code"] == "overloaded"
        assert memory_of(running).num_bytes == 0
        assert (await running.post("/v1/generate", body)).status_code == 200


def test_memory_stays_reserved_until_the_response_is_read_or_the_client_disconnects(
    serve: Serve, make_backend: MakeBackend
) -> None:
    with serve(make_backend()) as wire:
        memory = wire.server._service.response_memory
        connection = wire.connect()
        body = b'{"inputs": ["%s"], "parameters": {"min_new_tokens": 60, "return_attention": true}}' % LONG.encode()
        head = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: memory.num_bytes > 0)
        connection.close()
        wait_until(lambda: memory.num_bytes == 0)


# Time of tokenising


class SlowTokenizer(TextTokenizer):
    """Tokenizer that is slow for each text, in another thread."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer())
        self.num_texts = 0

    def encode(self, text: str, *, add_special_tokens: bool = True, is_start: bool = True) -> list[int]:
        self.num_texts += 1
        time.sleep(0.1)
        return super().encode(text[:10], add_special_tokens=add_special_tokens, is_start=is_start)


def slow_backend(make_backend: MakeBackend) -> tuple[FakeBackend, SlowTokenizer]:
    backend = make_backend()
    tokenizer = backend.tokenizer = SlowTokenizer()
    return backend, tokenizer


async def test_a_deadline_bounds_tokenisation(start: Start, make_backend: MakeBackend) -> None:
    """Regression: all inputs were tokenized after the deadline; 504 came after 2.4 s, not 1 s."""
    backend, tokenizer = slow_backend(make_backend)
    async with start(backend) as running:
        body = {"inputs": ["x" * 2000] * 20}
        response = await running.post("/v1/generate", body, **{"X-Request-Timeout-Ms": "300"})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        await asyncio.sleep(0.5)
        assert tokenizer.num_texts < 10  # the rest was not tokenized
        assert running.backend.runners[0].num_encodes == 0
