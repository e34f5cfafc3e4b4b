import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from service.logs import configure_logging
from tests.service.conftest import Start

SECRET = "Geheimrezept"


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What the process logs, from here on."""
    names = ("", "uvicorn", "asyncio")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.getLogger().handlers[:]
    stream = io.StringIO()
    configure_logging("info", stream)
    yield stream
    logging.getLogger().handlers[:] = handlers
    for logger, level in before:
        logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_record_is_one_line_of_json_with_its_time_in_utc(logged: io.StringIO) -> None:
    logging.getLogger("one").info("said %s\nand more", "this", extra={"fields": {"count": 3}})
    (line,) = lines(logged)
    assert (line["level"], line["logger"], line["message"], line["count"]) == ("info", "one", "said this\nand more", 3)
    assert line["ts"].endswith("+00:00")


def test_an_exception_is_in_its_line(logged: io.StringIO) -> None:
    try:
        raise RuntimeError("why")
    except RuntimeError:
        logging.getLogger("one").exception("failed")
    (line,) = lines(logged)
    assert "RuntimeError: why" in line["exception"]


@pytest.mark.anyio
async def test_each_call_is_one_line_that_agrees_with_its_answer_and_tells_nothing_of_its_text(
    start: Start, logged: io.StringIO
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
    assert SECRET not in logged.getvalue()
    for output in answer["outputs"]:
        assert json.dumps(output["text"])[1:-1] not in logged.getvalue()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/generate", {"inputs": "A dog"}), ("/v1/encode", {"inputs": "A dog"}), ("/v1/similar", {"token": "dog"})],
)
async def test_time_spent_on_tokens_is_told(start: Start, logged: io.StringIO, path: str, body: dict[str, Any]) -> None:
    async with start() as running:
        assert (await running.post(path, body)).status_code == 200
    (call,) = [line for line in lines(logged) if line["message"] == "request"]
    assert 0 < call["tokenize_ms"] <= call["total_ms"]
