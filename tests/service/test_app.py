"""What ends a process that has no more use, and with which exit code."""

import logging

import pytest

from service.bundle import BundleError
from service.engine.engine import Engine
from service.runtime.provider import RuntimeUnavailableError
from tests.service.conftest import MakeBackend, Start, until

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


async def test_an_orderly_end_is_not_taken_for_a_death(start: Start) -> None:
    async with start() as running:
        running.app.state.service.is_draining = True
        await running.app.state.service.stop()
    assert running.exit_codes == []
