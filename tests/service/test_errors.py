"""The table of errors is complete; load, deadlines and the end of a service cause its errors."""

import asyncio
import json
import re
import threading
from typing import Any, get_args

import httpx2 as httpx
import pytest

from sightline.service.api.endpoint import NATIVE_ERRORS, Call, Endpoint
from sightline.service.api_errors import ERRORS, ApiError, ErrorCode
from tests.service.conftest import MakeBackend, Running, Start, add_endpoint, until, with_heads
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio


def check(response: httpx.Response, code: str) -> None:
    """The one body, the status and the headers of a code."""
    kind = ERRORS[code]  # type: ignore[index]
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (kind.status, code, kind.type), response.text
    assert set(error) == {"code", "type", "message", "param", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert (response.headers.get("retry-after", "").isdigit()) == (kind.status in (429, 503))


@pytest.mark.parametrize("code", sorted(ERRORS.keys() - {"empty_input"}))  # its message names the field to fill
def test_the_message_of_every_code_says_what_to_do(code: ErrorCode) -> None:
    advice = r"; (send|ask|GET|use|leave|shorten|the log)|Retry later|\(X-Request-Timeout-Ms, SIGHTLINE_"
    assert re.search(advice, ERRORS[code].message)


def test_the_table_has_every_code_and_every_429_and_503_has_retry_after() -> None:
    assert set(ERRORS) == set(get_args(ErrorCode))
    for code, kind in ERRORS.items():
        assert (kind.retry_after_s is not None) == (kind.status in (429, 503)), code


async def test_response_too_large(start: Start, make_backend: MakeBackend) -> None:
    backend = with_heads(make_backend(), 200)
    async with start(backend) as running:
        response = await running.post("/v1/attention", {"inputs": "x" * 62, "targets": "y" * 62})
        check(response, "response_too_large")
        assert str(3 * 2 * 200 * 64 * 64) in response.json()["error"]["message"]
        assert backend.runners[0].num_encodes == 0  # known before anything was computed


async def test_a_bug_is_an_internal_error_and_its_text_stays_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as running:

        async def bug(call: Call) -> None:
            raise RuntimeError("secret")

        add_endpoint(running.app, Endpoint("GET", "/bug", bug))
        response = await running.client.get("/bug", headers={"x-request-id": "me"})
        check(response, "internal")
        assert "secret" not in response.text
        assert "secret" in caplog.text


async def test_overloaded(start: Start, make_backend: MakeBackend) -> None:
    """With one busy row and two queue positions, two of five calls are rejected at once, before
    tokenisation.
    """
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), max_rows=1, max_waiting_sequences=2) as running:
        calls = [asyncio.ensure_future(running.post("/v1/generate", {"inputs": "x"})) for _ in range(5)]
        await until(lambda: sum(call.done() for call in calls) == 2)
        hang.set()
        responses = await asyncio.gather(*calls)
        assert sorted(response.status_code for response in responses) == [200, 200, 200, 429, 429]
        for response in responses[3:]:
            check(response, "overloaded")
            assert response.json()["error"]["message"] == (
                "The queue is full: 3 of 3 sequences are running or waiting (SIGHTLINE_MAX_WAITING_SEQUENCES), and a "
                "call of 1 needs space for 1. Retry later."
            )
        assert await running.metric('sightline_request_failure_total{code="overloaded",model_name="fake"}') == 2
        assert running.app.state.service.models["fake"].admission.num_sequences == 0


async def test_a_call_that_would_wait_too_long_is_rejected_at_once_and_an_admitted_one_never(
    start: Start, make_backend: MakeBackend
) -> None:
    """Regression: calls were admitted and failed after queue_timeout_s in the queue."""
    hang = threading.Event()
    backend = make_backend(faults=Faults(hang=hang))
    async with start(backend, max_rows=1, queue_timeout_s=0.05) as running:
        calls = [asyncio.ensure_future(running.post("/v1/generate", {"inputs": "x"})) for _ in range(2)]
        await until(lambda: running.backend.num_busy == 2)
        await asyncio.sleep(0.2)  # longer than queue_timeout_s
        running.backend.engines[0].throughput.units_per_s = 100.0
        rejected = await running.post("/v1/generate", {"inputs": "y"})
        check(rejected, "overloaded")
        assert "would wait about 0.7 s; the limit is 0.05 s (SIGHTLINE_QUEUE_TIMEOUT_S)" in rejected.text
        hang.set()
        assert [response.status_code for response in await asyncio.gather(*calls)] == [200, 200]


async def test_a_call_that_cannot_end_before_its_deadline_is_rejected_at_once(
    start: Start, make_backend: MakeBackend
) -> None:
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang))) as running:
        call = asyncio.ensure_future(running.post("/v1/generate", {"inputs": "x"}))
        await until(lambda: running.backend.num_busy == 1)
        running.backend.engines[0].throughput.units_per_s = 100.0
        rejected = await running.post("/v1/generate", {"inputs": "y"}, **{"X-Request-Timeout-Ms": "500"})
        check(rejected, "overloaded")
        assert "would take about 0.7 s, but its deadline is in 0.5 s" in rejected.text
        hang.set()
        assert (await call).status_code == 200


async def test_loading(start: Start, make_backend: MakeBackend) -> None:
    may_load = threading.Event()
    async with start(make_backend(wait_for=may_load)) as running:
        try:
            check(await running.post("/v1/generate", {"inputs": "x"}), "loading")
            check(await running.client.get("/health/ready"), "loading")
            check(await running.client.get("/health"), "loading")
            check(await running.client.get("/v1/models"), "loading")
            assert (await running.client.get("/health/live")).status_code == 200
        finally:
            may_load.set()
        await until(lambda: running.app.state.service.unavailable_code is None)
        assert (await running.client.get("/health/ready")).json() == {"status": "ready", "failed_models": []}
        assert (await running.client.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize("code", ["draining", "engine_dead"])
async def test_a_service_that_ends_is_not_ready(running: Running, code: str) -> None:
    service = running.app.state.service
    (service.drain if code == "draining" else service.worker.abandon_thread)()
    check(await running.post("/v1/generate", {"inputs": "x"}), code)
    check(await running.client.get("/health/ready"), code)
    check(await running.client.get("/health"), code)
    assert (await running.client.get("/health/live")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "timeout_ms"), [({}, "50"), ({"request_timeout_s": 0.1, "queue_timeout_s": 0.1}, "60000")]
)
async def test_a_client_may_only_shorten_the_deadline(
    start: Start, make_backend: MakeBackend, settings: dict[str, Any], timeout_ms: str
) -> None:
    async with start(make_backend(step_s=0.02), **settings) as running:
        body = {"inputs": "x", "parameters": {"min_new_tokens": 60}}
        check(await running.post("/v1/generate", body, **{"X-Request-Timeout-Ms": timeout_ms}), "deadline_exceeded")
        await until(lambda: running.backend.num_busy == 0)


async def test_the_deadline_applies_while_the_engine_hangs(start: Start, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang))) as running:
        try:
            response = await running.post("/v1/generate", {"inputs": "x"}, **{"X-Request-Timeout-Ms": "50"})
            check(response, "deadline_exceeded")
            body = {"inputs": "x", "stream": True}
            check(await running.post("/v1/generate", body, **{"X-Request-Timeout-Ms": "50"}), "deadline_exceeded")
        finally:
            hang.set()


@pytest.mark.parametrize("value", [str(2**31 - 1), "9" * 5000])
async def test_a_deadline_longer_than_that_of_the_server_is_accepted(running: Running, value: str) -> None:
    """Regression: numbers of ten or more digits, such as 2**31 - 1, were rejected."""
    response = await running.post("/v1/generate", {"inputs": "x"}, **{"X-Request-Timeout-Ms": value})
    assert response.status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "٣"])
async def test_an_invalid_deadline_is_rejected(running: Running, value: str) -> None:
    headers = {b"x-request-timeout-ms": value.encode(), b"content-type": b"application/json"}
    response = await running.client.post("/v1/generate", content=b'{"inputs":"x"}', headers=headers)
    check(response, "invalid_parameter")
    assert response.json()["error"]["param"] == "X-Request-Timeout-Ms"


def test_an_error_has_only_the_given_fields() -> None:
    error = ApiError("invalid_parameter", "It is wrong.", field="inputs", index=3)
    assert json.loads(NATIVE_ERRORS.write(error, error.message({}), error.param({}), "r1")) == {
        "error": {
            "code": "invalid_parameter",
            "type": "invalid_request_error",
            "message": "inputs[3] is wrong.",
            "param": "inputs[3]",
            "request_id": "r1",
        }
    }
