"""Fault injection into the whole service: all endpoints run with one fault at a time."""

import asyncio
import contextlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest

from sightline.service.api_errors import ERRORS, ErrorCode
from tests.service.conftest import MakeBackend, Running, Start, classifying, until
from tests.service.faulty import Fault, FaultError, FaultKind, FaultyRunner, FaultyTokenizer, GraphName, Panic
from tests.support.fake_runner import FakeRunner

pytestmark = pytest.mark.anyio

FIVE = {"max_new_tokens": 5, "min_new_tokens": 5}
# Calls have different inputs, so that mixed-up results are detected.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/generate", {"inputs": "a dog", "parameters": {"max_new_tokens": 5}}),
    "several": ("/v1/generate", {"inputs": ["Hund Hund a", "dog"], "parameters": FIVE}),
    "beams": ("/v1/generate", {"inputs": "b dog", "parameters": {"num_beams": 3, "num_return_sequences": 2, **FIVE}}),
    "sampled": ("/v1/generate", {"inputs": "c dog", "parameters": {"do_sample": True, "seed": 3, **FIVE}}),
    "mapped": (
        "/v1/generate",
        {"inputs": "d dog", "parameters": {"return_attention": True, "top_logprobs": 2, **FIVE}},
    ),
    "stopped": ("/v1/generate", {"inputs": "e dog", "parameters": {"stop": ["xyz", "q"], **FIVE}}),
    "streamed": ("/v1/generate", {"inputs": "f dog", "stream": True, "parameters": FIVE}),
    "score": ("/v1/score", {"inputs": "g dog", "targets": "Hund a dog"}),
    "attention": ("/v1/attention", {"inputs": "h dog", "parameters": {"max_new_tokens": 5}}),
    "align": ("/v1/align", {"inputs": "s dog", "parameters": {"max_new_tokens": 5}}),
    "encode": ("/v1/encode", {"inputs": "i dog", "pooling": "mean"}),
    "classify": ("/v1/classify", {"inputs": "j dog", "model": "judge"}),
    "tokenize": ("/v1/tokenize", {"inputs": "k dog"}),
    "detokenize": ("/v1/detokenize", {"ids": [[70, 71, 72]]}),
    "completions": ("/v1/completions", {"model": "fake", "prompt": "l dog", "max_tokens": 5, "logprobs": 1}),
    "completions streamed": ("/v1/completions", {"model": "fake", "prompt": "m dog", "max_tokens": 5, "stream": True}),
    "embeddings": ("/v1/embeddings", {"model": "fake", "input": "n dog"}),
    "infer": (
        "/v2/models/fake/infer",
        {
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["o dog"]}],
            "parameters": {"max_new_tokens": 5},
        },
    ),
    "tgi": ("/generate", {"inputs": "p dog", "parameters": {"max_new_tokens": 5}}),
    "tgi streamed": ("/generate_stream", {"inputs": "q dog", "parameters": {"max_new_tokens": 5}}),
    "tei": ("/embed", {"inputs": "r dog"}),
}
STREAMS = {"streamed", "completions streamed", "tgi streamed"}
# Fields with times and random ids.
VOLATILE = re.compile(rb'"(?:timings_ms":\{[^}]*\}|[a-z_]*(?:_time|_ms|created)":[0-9.]+|id":"[a-z]+-[^"]*")')


class Results:
    """Outcomes of the calls of one round."""

    def __init__(self, bodies: dict[str, tuple[int, bytes]]) -> None:
        self.bodies = {name: (status, VOLATILE.sub(b"", body)) for name, (status, body) in bodies.items()}

    def failed(self, expected: "Results") -> dict[str, str]:
        """Return the error code of each failed call, after checking its documented format."""
        return {name: self._code(name, expected) for name in self.bodies if self.bodies[name] != expected.bodies[name]}

    def _code(self, name: str, expected: "Results") -> str:
        status, body = self.bodies[name]
        if status == 200:  # all that the stream sent is what it should have sent, and then comes one error
            assert name in STREAMS, (name, body)
            *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
            assert b"".join(event + b"\n\n" for event in events) in expected.bodies[name][1]
            body = last.removeprefix(b"event: error\n").removeprefix(b"data:")
        error = orjson.loads(body)["error"]
        codes: list[ErrorCode] = [
            code for code in ("internal", "deadline_exceeded", "engine_dead") if self._says(error, code)
        ]
        assert len(codes) == 1, body
        assert status in (200, ERRORS[codes[0]].status)
        return codes[0]

    @staticmethod
    def _says(error: Any, code: ErrorCode) -> bool:
        """Return True if an error body has the code, or its message in formats without codes."""
        return ERRORS[code].message in error if isinstance(error, str) else error["code"] == code


class Service:
    """A running service, its faults, and the results of its calls without faults."""

    def __init__(self, running: Running, runners: list[FaultyRunner], tokenizer: FaultyTokenizer) -> None:
        self.running = running
        self.runners = runners
        self.tokenizer = tokenizer

    async def call_all(self) -> Results:
        """Send all calls concurrently and check that each ends exactly once."""

        async def call(name: str) -> tuple[int, bytes]:
            path, body = CALLS[name]
            response = await self.running.post(path, body, **{"x-request-id": name.replace(" ", "-")})
            return response.status_code, response.content

        ended = await asyncio.gather(*map(call, CALLS))
        return Results(dict(zip(CALLS, ended, strict=True)))

    async def check_idle(self) -> None:
        """Check that nothing runs, waits or is reserved."""
        running = self.running
        await until(lambda: running.backend.num_busy == 0)
        self.check_released()
        metrics = (await running.client.get("/metrics")).text
        for model in running.app.state.service.models:
            for gauge in ("running", "waiting"):
                assert f'sightline_num_requests_{gauge}{{model_name="{model}"}} 0.0\n' in metrics

    def check_released(self) -> None:
        """Check that all reservations are released."""
        service = self.running.app.state.service
        assert service.models
        for model in service.models.values():
            admission = model.admission
            assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (0, 0, 0)
        assert service.response_memory.num_bytes == 0


@contextlib.asynccontextmanager
async def serving(start: Start, make_backend: MakeBackend, **settings: Any) -> AsyncIterator[Service]:
    runners: list[FaultyRunner] = []

    def wrap(runner: FakeRunner) -> FaultyRunner:
        runners.append(FaultyRunner(runner))
        return runners[-1]

    backend = classifying(make_backend(wrap=wrap))
    tokenizer = FaultyTokenizer(backend.tokenizer)
    backend.tokenizer = tokenizer
    async with start(backend, max_batch_tokens=32, **settings) as running:  # several runs of the encoder
        yield Service(running, runners, tokenizer)


@contextlib.contextmanager
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[Counter[str]]:
    """Count the log lines of calls by their request id."""
    counts: Counter[str] = Counter()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        yield counts
    for record in caplog.records:
        if record.getMessage() == "request":
            counts[vars(record)["fields"]["request_id"]] += 1


async def call_all_once(service: Service, caplog: pytest.LogCaptureFixture) -> Results:
    """Return the results of all calls after a check that each was logged once and has ended."""
    with log_lines(caplog) as lines:
        results = await service.call_all()
    assert set(lines.values()) == {1} and len(lines) == len(CALLS)
    await service.check_idle()
    return results


@pytest.mark.parametrize("kind", ["raise", "poison", "nan"])
@pytest.mark.parametrize("graph", ["encoder", "step"])
async def test_a_fault_at_any_call_of_a_graph_fails_one_call_at_most(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, graph: GraphName, kind: FaultKind
) -> None:
    failures: dict[str, str] = {}
    async with serving(start, make_backend) as service:
        expected = await service.call_all()
        assert {status for status, _ in expected.bodies.values()} == {200}
        for number in itertools.count(1):
            fault = Fault(graph, number, kind)
            service.runners[0].arm(fault)
            failed = (await call_all_once(service, caplog)).failed(expected)
            if not fault.has_happened:
                break
            assert len(failed) <= 1 and set(failed.values()) <= {"internal"}, failed
            failures |= failed
        service.runners[0].arm(None)
        assert (await service.call_all()).failed(expected) == {}
        assert service.running.exit_codes == []
    assert number > {"encoder": 3, "step": 5}[graph]
    assert failures or kind == "raise"
    assert not failures.keys() & {"tokenize", "detokenize", "classify"}  # they do not use the graphs


@pytest.mark.parametrize(
    ("method", "error"),
    [(method, FaultError) for method in ("encode", "encode_spans", "name", "bytes_of", "decode")]
    + [("encode", Panic), ("encode_spans", Panic)],
)
async def test_a_tokenizer_that_raises_fails_one_call_at_most(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, method: str, error: type[BaseException]
) -> None:
    async with serving(start, make_backend) as service:
        expected = await service.call_all()
        number = 1
        while True:
            service.tokenizer.arm(method, number, error)
            failed = (await call_all_once(service, caplog)).failed(expected)
            if not service.tokenizer.has_happened:
                break
            assert list(failed.values()) == ["internal"], failed
            number += 1 + number // 4  # every call at first; some methods are called for each token
        assert service.running.exit_codes == []
    assert number > 1


@pytest.mark.parametrize(("graph", "number"), [("encoder", 1), ("step", 4)])
async def test_a_graph_that_hangs_ends_every_call_in_time_and_then_the_process(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, graph: GraphName, number: int
) -> None:
    monkeypatch.setattr("sightline.service.app.WATCH_INTERVAL_S", 0.02)
    async with serving(start, make_backend) as service:
        expected = await service.call_all()
    async with serving(start, make_backend, request_timeout_s=1.0, queue_timeout_s=1.0) as service:
        fault = Fault(graph, number, "hang")
        service.runners[0].arm(fault)
        try:
            results = await service.call_all()
            assert fault.has_happened
            failed = results.failed(expected)
            assert failed and set(failed.values()) <= {"deadline_exceeded", "engine_dead"}
            await until(lambda: service.running.exit_codes == [1])
        finally:
            fault.release.set()
        service.check_released()  # the engine thread was abandoned
