import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import duration, main, parse_arguments
from tests.loadtest.fake_service import FakeService, Reply, rejection, translation, whole

pytestmark = pytest.mark.anyio


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text("Two girls.\n\nEin Mädchen – “ja”.\n", encoding="utf-8")
    return path


async def run_main(service: FakeService, sentences: Path, *arguments: str) -> int:
    own = ["--url", service.url, "--sentences", str(sentences), "--warm-up", "0", *arguments]
    return await asyncio.to_thread(main, own)


async def test_a_run_prints_a_table_and_writes_its_configuration_and_figures(
    sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    async with FakeService(lambda n, request: translation()) as service:
        arguments = ("--clients", "2", "--requests", "8", "--max-new-tokens", "9", "--json", str(file))
        assert await run_main(service, sentences, *arguments) == 0
        bodies = [request.body for request in service.requests]
        assert bodies[:2] == [
            {"inputs": "Two girls.", "parameters": {"max_new_tokens": 9}},
            {"inputs": "Ein Mädchen – “ja”.", "parameters": {"max_new_tokens": 9}},
        ]
    assert "8 sent" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["arguments"]["clients"] == 2
    assert written["arguments"]["requests"] == 8
    assert written["figures"]["succeeded"] == 8
    assert written["figures"]["latency_ms"]["count"] == 8
    assert set(written) == {
        "arguments", "versions", "commit", "started_at", "client_processor_share", "figures",
    }  # fmt: skip
    assert {"python", "httptools"} <= set(written["versions"])


async def test_the_key_of_a_file_is_sent_and_not_recorded(
    sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, key = tmp_path / "load.json", tmp_path / "key"
    key.write_text("sl-secret\n", encoding="ascii")
    async with FakeService(lambda n, request: translation()) as service:
        arguments = ("--requests", "2", "--key-file", str(key), "--json", str(file))
        assert await run_main(service, sentences, *arguments) == 0
        assert [request.key for request in service.requests] == ["sl-secret", "sl-secret"]
    assert "sl-secret" not in file.read_text(encoding="utf-8") + capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        ((), "/v1/generate", {"inputs": "Two girls."}),
        (("--stream",), "/v1/generate", {"inputs": "Two girls.", "stream": True}),
        (("--endpoint", "encode"), "/v1/encode", {"inputs": "Two girls.", "pooling": "mean"}),
        (("--endpoint", "attention"), "/v1/attention", {"inputs": "Two girls."}),
    ],
)
async def test_each_endpoint_gets_a_valid_request(
    sentences: Path, arguments: tuple[str, ...], path: str, body: dict[str, Any]
) -> None:
    async with FakeService(lambda n, request: rejection("loading")) as service:
        await run_main(service, sentences, "--requests", "1", *arguments)
        assert [(request.path, request.body) for request in service.requests] == [(path, body)]


async def test_a_run_with_only_rejections_is_no_failure(sentences: Path) -> None:
    async with FakeService(lambda n, request: rejection("overloaded")) as service:
        assert await run_main(service, sentences, "--requests", "2") == 0


@pytest.mark.parametrize("reply", [whole(500, {"error": {"code": "internal"}}), Reply([], closes=True)])
async def test_a_failure_makes_the_exit_status_1(sentences: Path, reply: Reply) -> None:
    async with FakeService(lambda n, request: reply if n == 1 else translation()) as service:
        assert await run_main(service, sentences, "--requests", "3") == 1


async def test_the_warm_up_is_not_measured(sentences: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeService(lambda n, request: whole(500, {}) if n == 0 else translation()) as service:
        assert await run_main(service, sentences, "--requests", "3", "--clients", "1", "--warm-up", "200ms") == 0
        assert len(service.requests) > 4
    assert "3 sent" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10), ("500ms", 0.5), ("2m", 120), ("7", 7), ("1.5s", 1.5)])
def test_a_duration_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--duration", "soon"], "must be a duration such as 500ms, 10s or 2m, got 'soon'"),
        (["--clients", "0"], "must be at least 1, got 0"),
        (["--rate", "nan"], "must be a finite number greater than 0, got nan"),
        (["--rate", "5", "--clients", "4"], "not allowed with"),
        (["--rate", "5", "--retry"], "--retry needs a closed loop; remove --rate"),
        (["--endpoint", "encode", "--stream"], "--stream needs --endpoint generate"),
        (["--endpoint", "encode", "--max-new-tokens", "4"], "--max-new-tokens needs --endpoint generate or attention"),
        (["--url", "localhost"], "must be an HTTP URL such as http://127.0.0.1:8000, got 'localhost'"),
        (["--sentences", "nowhere.txt"], "nowhere.txt"),
        (["--sentences", "/dev/null"], "has no sentences; expected one sentence per line"),
        (["--key-file", "nowhere"], "--key-file: [Errno 2] No such file or directory: 'nowhere'"),
        (["--key-file", "LICENSE"], "LICENSE must have one key and nothing else"),
        (["--json", "nowhere/load.json"], "the folder nowhere does not exist; create it"),
    ],
)
def test_invalid_arguments_are_rejected_before_any_load(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        parse_arguments(arguments)
    assert exit_status.value.code == 2
    assert complaint in capsys.readouterr().err
