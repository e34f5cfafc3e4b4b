import contextlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest

from sightline.service.http.dispatch import log_call
from sightline.service.http.http_call import POLLED_ROUTES
from sightline.service.logs import FLUSH_S, MAX_WAITING_LINES, QueuedHandler, configure_logging, num_dropped_lines
from tests.service.conftest import Start
from tests.support.tables import read_table

SECRET = "Geheimrezept"


@dataclass(frozen=True)
class Logged:
    """The logs of this process since the start of a test."""

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


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def logged_text(stream: io.BytesIO) -> str:
    """Return the text of some log lines, with TIME for the time of day."""
    logger = logging.getLogger("one")
    with logging_to(stream) as handler:
        logger.info("said %s", "this", extra={"fields": {"count": 3, "names": ["a", "b"], "word": "so", "none": None}})
        logger.info("terse", extra={"fields": {"count": 3}, "text": "a sentence"})
        logger.warning("two\nlines\x1b[2J\u2028\x9b", extra={"fields": {"value": "a b\n\x1b"}})
        try:
            raise RuntimeError("why\x1b")
        except RuntimeError:
            logger.exception("failed")
        log_call(
            logging.INFO,
            {"method": "GET", "route": "/docs", "model": None, "status": 503, "code": "draining", "total_ms": 1.5},
        )
        handler.flush()
        text = stream.getvalue().decode()
    return re.sub(r"(?m)^(\x1b\[2m)?\d\d:\d\d:\d\d\.\d{3}", r"\1TIME", text)


def test_lines_on_a_terminal_are_readable_text_in_color_without_control_characters_of_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = logged_text(Terminal()).splitlines()
    assert lines[:4] == [
        '\x1b[2mTIME\x1b[0m \x1b[32minfo   \x1b[0m said this  \x1b[2mcount=3 names=["a","b"] word=so\x1b[0m',
        "\x1b[2mTIME\x1b[0m \x1b[32minfo   \x1b[0m a sentence",
        "\x1b[2mTIME\x1b[0m \x1b[33mwarning\x1b[0m two\\x0alines\\x1b[2J\\u2028\\x9b  "
        '\x1b[2mvalue="a b\\n\\u001b"\x1b[0m',
        "\x1b[2mTIME\x1b[0m \x1b[31merror  \x1b[0m failed",
    ]
    assert lines[4] == "    Traceback (most recent call last):"
    assert lines[-2] == "    RuntimeError: why\\x1b"
    assert lines[-1] == "\x1b[2mTIME\x1b[0m \x1b[32minfo   \x1b[0m GET /docs 503 draining 1.5 ms"


def test_text_has_no_colors_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = logged_text(Terminal())
    assert text.startswith('TIME info    said this  count=3 names=["a","b"] word=so\nTIME info    a sentence\n')
    assert "\x1b" not in text


def test_lines_are_json_without_a_terminal() -> None:
    lines = [json.loads(line) for line in logged_text(io.BytesIO()).split("\n")[:-1]]
    assert [line["message"] for line in lines][:2] == ["said this", "terse"]
    assert lines[1]["count"] == 3 and "text" not in lines[1]


@pytest.mark.parametrize("kind", [Terminal, io.BytesIO])
def test_a_line_that_cannot_be_formatted_is_counted_and_invalid_utf_8_is_escaped(kind: type[io.BytesIO]) -> None:
    stream = kind()
    logger = logging.getLogger("one")
    with logging_to(stream) as handler:
        logger.info("%d", "no number")
        logger.info("file \udcff", extra={"fields": {"name": "a \udcfe"}})
        logger.info("after")
        handler.flush()
        assert handler.num_dropped == 1
    escaped, after = stream.getvalue().decode().splitlines()
    assert "file \\udcff" in escaped and "a \\udcfe" in escaped
    assert "after" in after


@pytest.mark.anyio
async def test_each_call_is_one_line_that_agrees_with_its_response_and_omits_its_text(
    start: Start, logged: Logged
) -> None:
    async with start() as running:
        body = {"inputs": [SECRET, "x"], "parameters": {"max_new_tokens": 40}}
        response = (await running.post("/v1/generate", body, **{"X-Request-Id": "mine"})).json()
        await running.post("/v1/generate", {"inputs": SECRET, "stream": True})
        await running.post("/v1/generate", {"inputs": SECRET, SECRET: 1})
        for path in POLLED_ROUTES:
            await running.client.get(path)
    calls = [line for line in lines(logged) if line["message"] == "request"]
    assert [line["status"] for line in calls] == [200, 200, 422]  # health checks are debug
    whole, stream, rejected = calls
    assert (whole["request_id"], whole["route"], whole["method"], whole["model"]) == (
        "mine",
        "/v1/generate",
        "POST",
        "fake",
    )
    assert whole["code"] is None
    assert (whole["input_tokens"], whole["output_tokens"]) == tuple(response["usage"].values())
    for part in ("tokenize", "queue", "encode", "decode"):
        assert whole[f"{part}_ms"] == response["timings_ms"][part]
    assert whole["total_ms"] >= response["timings_ms"]["total"]
    assert whole["finish_reasons"] == [output["finish_reason"] for output in response["outputs"]]
    assert 0 < stream["ttft_ms"] <= stream["total_ms"]
    assert (rejected["code"], rejected["model"]) == ("invalid_parameter", None)
    assert SECRET not in logged.text
    for output in response["outputs"]:
        assert json.dumps(output["text"])[1:-1] not in logged.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/generate", {"inputs": "A dog"}), ("/v1/encode", {"inputs": "A dog"})],
)
async def test_time_spent_on_tokens_is_logged(start: Start, logged: Logged, path: str, body: dict[str, Any]) -> None:
    async with start() as running:
        assert (await running.post(path, body)).status_code == 200
    (call,) = [line for line in lines(logged) if line["message"] == "request"]
    assert 0 < call["tokenize_ms"] <= call["total_ms"]


def read_lines(descriptor: int, until: str) -> list[dict[str, Any]]:
    """Read lines from a pipe up to the line with this message."""
    read = []
    with open(descriptor, "rb", closefd=False) as pipe:
        for line in pipe:
            read.append(json.loads(line))
            if read[-1]["message"] == until:
                return read
    raise AssertionError(f"{until!r} never came")


@contextlib.contextmanager
def piped(*, is_blocking: bool = True) -> Iterator[tuple[int, QueuedHandler]]:
    """Log into a pipe; yield its read end and the handler."""
    reader, writer = os.pipe()
    os.set_blocking(writer, is_blocking)
    with io.FileIO(writer, "w") as stream, logging_to(stream) as handler:
        try:
            yield reader, handler
        finally:
            os.close(reader)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_reader_that_stops_reading_blocks_nothing_and_every_lost_line_is_counted(is_blocking: bool) -> None:
    with piped(is_blocking=is_blocking) as (reader, handler):
        logger = logging.getLogger("one")
        num_logged = 4 * MAX_WAITING_LINES  # more than the queue, the thread and the pipe hold together
        started = time.monotonic()
        for number in range(num_logged):
            logger.info("line", extra={"fields": {"number": number}})
        assert time.monotonic() - started < 60
        dropped = handler.num_dropped
        assert 0 < dropped <= num_logged - MAX_WAITING_LINES
        assert num_dropped_lines() == dropped
        # When the reader resumes, it gets every kept line, complete and in order.
        numbers: list[int] = []
        with open(reader, "rb", closefd=False) as pipe:
            while len(numbers) < num_logged - dropped:
                numbers.append(json.loads(next(pipe))["number"])
        assert numbers[:MAX_WAITING_LINES] == list(range(MAX_WAITING_LINES))
        assert numbers == sorted(set(numbers))  # the writer may have freed places in the queue meanwhile
        logger.info("after")
        assert [line["message"] for line in read_lines(reader, "after")] == ["after"]
        assert handler.num_dropped == dropped


def test_flushing_waits_for_the_reader_up_to_a_limit() -> None:
    with piped() as (_, handler):
        logging.getLogger("one").info("x" * 1_000_000)  # more than the capacity of the pipe
        started = time.monotonic()
        handler.flush()
        assert FLUSH_S <= time.monotonic() - started < FLUSH_S + 20
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
async def test_dropped_lines_are_a_metric(start: Start) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.FileIO(writer, "w") as stream, logging_to(stream) as handler:
        async with start() as running:
            await running.post("/v1/generate", {"inputs": "x"})
            handler.flush()
            dropped = handler.num_dropped
            assert dropped >= 2  # those of the start and the call
            assert await running.metric("sightline_log_lines_dropped_total") == dropped


@pytest.mark.anyio
@pytest.mark.parametrize(("peer", "forwarded", "client"), read_table(__file__))
async def test_a_line_has_the_client_its_program_and_a_path_without_a_route(
    start: Start, logged: Logged, peer: str, forwarded: list[str], client: str
) -> None:
    async with start() as running:
        transport = httpx.ASGITransport(app=running.app, client=(peer, 1))
        headers = [("user-agent", "p" * 300), *(("x-forwarded-for", value) for value in forwarded)]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await http.get("/nothing%0A%E2%80%A8?key=secret", headers=headers)
            await http.get("/v1/models", headers=headers)
    unknown, known = (line for line in lines(logged) if line["message"] == "request")
    assert (unknown["client"], unknown["user_agent"]) == (client, "p" * 200)
    assert unknown["path"] == "/nothing%0A%E2%80%A8" and "path" not in known
