"""What ends a process that has no more use, and with which exit code."""

import asyncio
import logging
import threading

import pytest

from service.bundle import BundleError
from service.engine.engine import Engine
from service.runtime.provider import RuntimeUnavailableError
from tests.service.conftest import MakeBackend, Start, until
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BundleError("toy/manifest.json is broken"), "cannot serve: toy/manifest.json is broken"),
        (RuntimeUnavailableError("no CUDA"), "cannot serve: no CUDA"),
        (RuntimeError("bad graph"), "cannot serve: RuntimeError: bad graph"),
    ],
)
async def test_what_cannot_be_loaded_ends_the_process_with_3_and_one_line(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, error: Exception, message: str
) -> None:
    async with start(make_backend(error=error)) as running:
        await until(lambda: bool(running.exit_codes))
        assert running.exit_codes == [3]
        assert [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR] == [message]
        assert (await running.client.get("/health/ready")).json()["error"]["code"] == "loading"


async def test_an_engine_that_dies_fails_its_calls_and_ends_the_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as running:

        def die(engine: Engine) -> None:
            raise SystemExit

        monkeypatch.setattr(Engine, "step", die)
        answer = await running.post("/v1/generate", {"inputs": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        await until(lambda: bool(running.exit_codes))
        assert running.exit_codes == [1]


async def test_an_engine_that_dies_while_the_service_drains_ends_the_process_with_1_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as running:

        def die(engine: Engine) -> None:
            running.app.state.service.drain()
            raise SystemExit

        monkeypatch.setattr(Engine, "step", die)
        call = asyncio.ensure_future(running.post("/v1/generate", {"inputs": "x"}))
        await until(lambda: bool(running.exit_codes))
        assert running.exit_codes == [1]
        assert (await call).json()["error"]["code"] == "engine_dead"


async def test_a_step_that_takes_longer_than_any_request_may_ends_the_process(
    start: Start, make_backend: MakeBackend
) -> None:
    hang = threading.Event()
    backend = make_backend(faults=Faults(hang=hang))
    async with start(backend, request_timeout_s=0.3, queue_timeout_s=0.3) as running:
        try:
            answer = await running.post("/v1/generate", {"inputs": "x"})
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            await until(lambda: bool(running.exit_codes))
            assert running.exit_codes == [1]
        finally:
            hang.set()


async def test_an_orderly_end_is_not_taken_for_a_death(start: Start) -> None:
    async with start() as running:
        running.app.state.service.drain()
        await running.app.state.service.stop()
    assert running.exit_codes == []
