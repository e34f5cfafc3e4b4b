"""Start of the application, and the failures that end its process with their exit codes."""

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from sightline.base.bundle import BundleError
from sightline.service.app import size_text
from sightline.service.engine.engine import Engine
from sightline.service.runtime.runner import RuntimeUnavailableError
from tests.service.conftest import MakeBackend, Start, until
from tests.support.fake_runner import FakeRunner, Faults

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BundleError("toy/manifest.json is broken"), "cannot serve: toy/manifest.json is broken"),
        (RuntimeUnavailableError("no CUDA"), "cannot serve: no CUDA"),
        (RuntimeError("bad graph"), "cannot serve: RuntimeError: bad graph"),
    ],
)
async def test_a_failed_load_ends_the_process_with_3_and_one_line(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, error: Exception, message: str
) -> None:
    async with start(make_backend(error=error)) as running:
        await until(lambda: bool(running.exit_codes))
        assert running.exit_codes == [3]
        assert [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR] == [message]
        assert (await running.client.get("/health/ready")).json()["error"]["code"] == "loading"


async def test_models_that_failed_to_load_are_shown_and_the_others_are_served(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start(make_backend("one", failed={"two": "its SHA-256 differs"})) as running:
        assert (await running.post("/v1/generate", {"inputs": "x"})).status_code == 200
        ready = await running.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "failed_models": ["two"]})
        assert (await running.client.get("/")).json()["failed_models"] == ["two"]
        assert await running.metric("sightline_models_failed") == 1
        assert running.exit_codes == []
    (summary,) = [record for record in caplog.records if record.getMessage() == "serving"]
    assert summary.fields["failed_models"] == ["two"]  # type: ignore[attr-defined]
    assert summary.text.startswith("serving 1 model; 1 failed to load; default: one; memory: ")  # type: ignore[attr-defined]


async def test_the_lines_at_the_start_name_models_threads_rows_and_memory(
    start: Start, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start(make_backend("one", "three"), max_state_bytes=7_000_000, max_response_bytes=3_000_000):
        pass
    texts = [record.text for record in caplog.records if hasattr(record, "text")]
    assert texts[:2] == [
        "ready: one    float32 on cpu, 32 rows, threads: default",
        "ready: three  float32 on cpu, 32 rows, threads: default",
    ]
    (summary,) = [record.fields for record in caplog.records if record.getMessage() == "serving"]  # type: ignore[attr-defined]
    assert texts[2] == (
        f"serving 2 models; default: one; memory: {size_text(summary['resident_bytes'])} now, "
        "up to 7 MB more for decoder state and 3 MB for responses"
    )
    assert summary["models"] == ["one", "three"]
    assert (summary["default_model"], summary["max_state_bytes"]) == ("one", 7_000_000)
    assert summary["resident_bytes"] > 10_000_000


@pytest.mark.parametrize("is_draining", [False, True])
async def test_an_engine_that_dies_fails_its_calls_and_ends_the_process(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_draining: bool
) -> None:
    async with start() as running:

        def die(engine: Engine) -> None:
            if is_draining:
                running.app.state.service.drain()
            raise SystemExit

        monkeypatch.setattr(Engine, "step", die)
        response = await running.post("/v1/generate", {"inputs": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        await until(lambda: bool(running.exit_codes))
        assert running.exit_codes == [1]


async def test_a_step_longer_than_the_request_timeout_ends_the_process(start: Start, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    backend = make_backend(faults=Faults(hang=hang))
    async with start(backend, request_timeout_s=0.3, queue_timeout_s=0.3) as running:
        try:
            response = await running.post("/v1/generate", {"inputs": "x"})
            assert response.json()["error"]["code"] == "deadline_exceeded"
            await until(lambda: bool(running.exit_codes))
            assert running.exit_codes == [1]
        finally:
            hang.set()


async def test_a_pause_of_the_whole_process_ends_no_step(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a process that was stopped for longer than the request timeout in the middle of a
    step ended afterwards, and its clients got no response.
    """
    monkeypatch.setattr("sightline.service.app.WATCH_INTERVAL_S", 0.05)
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), request_timeout_s=0.3, queue_timeout_s=0.3) as running:
        worker = running.app.state.service.worker
        call = asyncio.create_task(running.post("/v1/generate", {"inputs": "x"}))
        try:
            await until(lambda: worker.step_started is not None)
            time.sleep(0.6)  # pauses the event loop, too
            await asyncio.sleep(0.05)
        finally:
            hang.set()
        assert (await call).json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: worker.step_started is None)
        assert (await running.post("/v1/generate", {"inputs": "x"})).status_code == 200
        assert running.exit_codes == []


async def test_while_a_model_is_loaded_again_after_it_hung_the_service_is_ready_and_others_are_served(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See decision 32."""
    monkeypatch.setattr("sightline.service.app.WATCH_INTERVAL_S", 0.02)
    is_allowed = threading.Event()  # the load
    endless: list[FakeRunner] = []

    def wrap(runner: FakeRunner) -> FakeRunner:
        if runner.manifest.name == "one" and not endless:

            def wait(*arguments: Any, **options: Any) -> Any:
                runner.is_terminated.wait()
                raise RuntimeError("terminated")

            monkeypatch.setattr(runner, "step", wait)
            endless.append(runner)
        return runner

    async with start(make_backend("one", "two", wrap=wrap), request_timeout_s=0.3, queue_timeout_s=0.3) as running:

        async def states() -> dict[str, str]:
            return {one["id"]: one["state"] for one in (await running.get("/v1/models"))["data"]}

        running.backend.repository.wait_for = is_allowed
        try:
            response = await running.post("/v1/generate", {"inputs": "x", "model": "one"})
            assert response.json()["error"]["code"] in {"deadline_exceeded", "internal"}
            await until(lambda: running.backend.repository.loads == ["one"])
            assert await states() == {"one": "loading", "two": "ready"}
            for path in ("/health/ready", "/v2/models/one/ready"):
                assert (await running.client.get(path)).status_code == 200
            assert (await running.post("/v1/generate", {"inputs": "x", "model": "two"})).status_code == 200
        finally:
            is_allowed.set()
        await until(lambda: running.app.state.service.state_of("one") == "ready")
        assert (await running.post("/v1/generate", {"inputs": "x", "model": "one"})).status_code == 200
        assert running.exit_codes == []


async def test_an_orderly_shutdown_is_not_a_failure(start: Start) -> None:
    async with start() as running:
        running.app.state.service.drain()
        await running.app.state.service.stop()
    assert running.exit_codes == []
