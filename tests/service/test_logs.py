import contextlib
import io
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from service.logs import FLUSH_S, MAX_WAITING_LINES, QueuedHandler, configure_logging, num_dropped_lines
from tests.service.conftest import Start

SECRET = "Geheimrezept"


@dataclass(frozen=True)
class Logged:
    """The logs of this process, from the start of a test on."""

    handler: QueuedHandler
    stream: io.BytesIO

    @property
    def text(self) -> str:
        self.handler.flush()
        return self.stream.getvalue().decode()


@contextlib.contextmanager
def logging_to(stream: Any) -> Iterator[QueuedHandler]:
    names = ("", "uvicorn", "asyncio")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.getLogger().handlers[:]
    handler = configure_logging("info", stream)
    try:
        yield handler
    finally:
        handler.close()
        logging.getLogger().handlers[:] = handlers
        for logger, level in before:
            logger.setLevel(level)


@pytest.fixture
def logged() -> Iterator[Logged]:
    stream = io.BytesIO()
    with logging_to(stream) as handler:
        yield Logged(handler, stream)


def lines(logged: Logged) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logged.text.splitlines()]


def test_each_record_is_one_line_of_json_with_its_time_in_utc(logged: Logged) -> None:
    logging.getLogger("one").info("said %s\nand more", "this", extra={"fields": {"count": 3}})
    (line,) = lines(logged)
    assert (line["level"], line["logger"], line["message"], line["count"]) == ("info", "one", "said this\nand more", 3)
    assert line["ts"].endswith("+00:00")


def test_an_exception_is_in_its_line(logged: Logged) -> None:
    try:
        raise RuntimeError("why")
    except RuntimeError:
        logging.getLogger("one").exception("failed")
    (line,) = lines(logged)
    assert "RuntimeError: why" in line["exception"]


@pytest.mark.anyio
async def test_each_call_is_one_line_that_agrees_with_its_answer_and_tells_nothing_of_its_text(
    start: Start, logged: Logged
) -> None:
    async with start() as running:
        body = {"inputs": [SECRET, "x"], "parameters": {"max_new_tokens": 40}}
        answer = (await running.post("/v1/generate", body, **{"X-Request-Id": "mine"})).json()
        await running.post("/v1/generate", {"inputs": SECRET, "stream": True})
        await running.post("/v1/generate", {"inputs": SECRET, SECRET: 1})
        for path in ("/health/live", "/health/ready", "/health", "/v2/health/live", "/v2/health/ready", "/metrics"):
            await running.client.get(path)
    calls = [line for line in lines(logged) if line["message"] == "request"]
    assert [line["status"] for line in calls] == [200, 200, 422]  # health checks are debug
    whole, stream, refused = calls
    assert (whole["request_id"], whole["route"], whole["method"], whole["model"]) == (
        "mine",
        "/v1/generate",
        "POST",
        "fake",
    )
    assert whole["code"] is None
    assert (whole["input_tokens"], whole["output_tokens"]) == tuple(answer["usage"].values())
    for part in ("tokenize", "queue", "encode", "decode"):
        assert whole[f"{part}_ms"] == answer["timings_ms"][part]
    assert whole["total_ms"] >= answer["timings_ms"]["total"]
    assert whole["finish_reasons"] == [output["finish_reason"] for output in answer["outputs"]]
    assert 0 < stream["ttft_ms"] <= stream["total_ms"]
    assert (refused["code"], refused["model"]) == ("invalid_parameter", None)
    assert SECRET not in logged.text
    for output in answer["outputs"]:
        assert json.dumps(output["text"])[1:-1] not in logged.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/generate", {"inputs": "A dog"}), ("/v1/encode", {"inputs": "A dog"}), ("/v1/similar", {"token": "dog"})],
)
async def test_time_spent_on_tokens_is_told(start: Start, logged: Logged, path: str, body: dict[str, Any]) -> None:
    async with start() as running:
        assert (await running.post(path, body)).status_code == 200
    (call,) = [line for line in lines(logged) if line["message"] == "request"]
    assert 0 < call["tokenize_ms"] <= call["total_ms"]


def read_lines(descriptor: int, until: str) -> list[dict[str, Any]]:
    """What comes out of a pipe, up to the line with this message."""
    read = []
    with open(descriptor, "rb", closefd=False) as pipe:
        for line in pipe:
            read.append(json.loads(line))
            if read[-1]["message"] == until:
                return read
    raise AssertionError(f"{until!r} never came")


@contextlib.contextmanager
def piped(*, is_blocking: bool = True) -> Iterator[tuple[int, QueuedHandler]]:
    """Logs into a pipe, and the end of it that a reader has."""
    reader, writer = os.pipe()
    os.set_blocking(writer, is_blocking)
    with io.FileIO(writer, "w") as stream, logging_to(stream) as handler:
        try:
            yield reader, handler
        finally:
            os.close(reader)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_reader_that_stops_reading_holds_up_nobody_and_loses_no_more_than_what_is_counted(is_blocking: bool) -> None:
    with piped(is_blocking=is_blocking) as (reader, handler):
        logger = logging.getLogger("one")
        num_logged = 2 * MAX_WAITING_LINES
        started = time.monotonic()
        for number in range(num_logged):
            logger.info("line", extra={"fields": {"number": number}})
        assert time.monotonic() - started < 5
        dropped = handler.num_dropped
        assert 0 < dropped <= num_logged - MAX_WAITING_LINES
        assert num_dropped_lines() == dropped
        # Where the reader goes on, all that was kept comes, whole and in order.
        numbers: list[int] = []
        with open(reader, "rb", closefd=False) as pipe:
            while len(numbers) < num_logged - dropped:
                numbers.append(json.loads(next(pipe))["number"])
        assert numbers[:MAX_WAITING_LINES] == list(range(MAX_WAITING_LINES))
        assert numbers == sorted(set(numbers))  # the queue may have had room again now and then
        logger.info("after")
        assert [line["message"] for line in read_lines(reader, "after")] == ["after"]
        assert handler.num_dropped == dropped


def test_flushing_waits_for_the_reader_but_not_for_ever() -> None:
    with piped() as (_, handler):
        logging.getLogger("one").info("x" * 1_000_000)  # more than the pipe holds
        started = time.monotonic()
        handler.flush()
        assert FLUSH_S <= time.monotonic() - started < FLUSH_S + 2
        assert handler.num_dropped == 0


def test_lines_that_cannot_be_written_are_counted_and_nothing_else_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.FileIO(writer, "w") as stream, logging_to(stream) as handler:
        for _ in range(3):
            logging.getLogger("one").info("lost")
        handler.flush()
        assert handler.num_dropped == num_dropped_lines() == 3
    assert capfd.readouterr() == ("", "")


@pytest.mark.anyio
async def test_dropped_lines_are_a_metric(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.FileIO(writer, "w") as stream, logging_to(stream) as handler:
        async with start() as running:
            await running.post("/v1/generate", {"inputs": "x"})
            handler.flush()
            dropped = handler.num_dropped
            assert dropped >= 2  # "ready" and the call
            assert await running.metric("sightline_log_lines_dropped_total") == dropped
