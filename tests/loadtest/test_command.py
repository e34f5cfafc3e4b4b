import asyncio
import errno
import json
import math
import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sightline.__main__ import main
from sightline.loadtest.arguments import duration, rates, read_prompts
from sightline.loadtest.client import Client
from sightline.loadtest.load import arrival_times
from sightline.loadtest.load_record import make_record, read_record, write_record
from sightline.loadtest.profiles import Stage
from tests.loadtest.fake_service import FakeService, Reply, Request, rejection, translation, whole
from tests.loadtest.test_compare import queue
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("Two girls.\n\nEin Mädchen – “ja”.\n", encoding="utf-8")
    return path


async def run_main(service: FakeService, prompts: Path, *arguments: str) -> int:
    """Run `sightline load`, which a busy machine does not make invalid."""
    own = ["load", "--url", service.url, "--prompts", str(prompts), "--warm-up", "0", "--max-lag", "1m", *arguments]
    return await asyncio.to_thread(main, own)


async def test_a_run_prints_a_table_and_writes_its_configuration_and_figures(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    async with FakeService(lambda n, request: translation()) as service:
        arguments = ("--clients", "2", "--requests", "8", "--max-new-tokens", "9", "--json", str(file))
        assert await run_main(service, prompts, *arguments) == 0
        bodies = [request.body for request in service.requests]
        assert bodies[:2] == [
            {"inputs": "Two girls.", "parameters": {"max_new_tokens": 9}},
            {"inputs": "Ein Mädchen – “ja”.", "parameters": {"max_new_tokens": 9}},
        ]
    assert "8 sent" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["arguments"]["clients"] == 2
    assert written["arguments"]["requests"] == 8
    (stage,) = written["stages"]
    assert stage["figures"]["succeeded"] == 8
    assert stage["figures"]["latency_ms"]["count"] == 8
    assert len(stage["requests"]["latency_s"]) == 8
    assert set(written) == {
        "arguments", "versions", "commit", "started_at", "client_processor_share", "is_valid", "stages",
    }  # fmt: skip
    assert {"python", "httptools"} <= set(written["versions"])


async def test_the_key_of_a_file_is_sent_and_not_recorded(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, key = tmp_path / "load.json", tmp_path / "key"
    key.write_text("sl-secret\n", encoding="ascii")
    async with FakeService(lambda n, request: translation()) as service:
        arguments = ("--requests", "2", "--key-file", str(key), "--json", str(file))
        assert await run_main(service, prompts, *arguments) == 0
        assert [request.key for request in service.requests] == ["sl-secret", "sl-secret"]
    assert "sl-secret" not in file.read_text(encoding="utf-8") + capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    read_table(__file__, "requests"),
)
async def test_each_endpoint_gets_a_valid_request(
    prompts: Path, arguments: tuple[str, ...], path: str, body: dict[str, Any]
) -> None:
    async with FakeService(lambda n, request: rejection("loading")) as service:
        await run_main(service, prompts, "--requests", "1", *arguments)
        assert [(request.path, request.body) for request in service.requests] == [(path, body)]


async def test_a_run_with_only_rejections_is_no_failure(prompts: Path) -> None:
    async with FakeService(lambda n, request: rejection("overloaded")) as service:
        assert await run_main(service, prompts, "--requests", "2") == 0


@pytest.mark.parametrize("reply", [whole(500, {"error": {"code": "internal"}}), Reply([], closes=True)])
async def test_a_failure_makes_the_exit_status_1(prompts: Path, reply: Reply) -> None:
    async with FakeService(lambda n, request: reply if n == 1 else translation()) as service:
        assert await run_main(service, prompts, "--requests", "3") == 1


async def test_the_warm_up_is_not_measured(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeService(lambda n, request: whole(500, {}) if n == 0 else translation()) as service:
        assert await run_main(service, prompts, "--requests", "3", "--clients", "1", "--warm-up", "200ms") == 0
        assert len(service.requests) > 4
    assert "3 sent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "response"),
    [
        (("--endpoint", "openai-embeddings", "--model", "m"), {"data": [], "usage": {"prompt_tokens": 3}}),
        (("--endpoint", "tei-embed"), [[0.5, 0.1]]),
        (("--endpoint", "oip-infer", "--model", "m"), {"outputs": []}),
    ],
)
async def test_the_response_of_each_api_is_a_success(prompts: Path, arguments: tuple[str, ...], response: Any) -> None:
    async with FakeService(lambda n, request: whole(200, response)) as service:
        assert await run_main(service, prompts, "--requests", "1", *arguments) == 0


async def test_a_jsonl_file_has_texts_and_the_messages_of_chats(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"Two\\ngirls."\n{json.dumps(messages)}\n', encoding="utf-8")
    async with FakeService(lambda n, request: translation()) as service:
        chat = ("--endpoint", "openai-chat", "--model", "m", "--requests", "2", "--clients", "1")
        assert await run_main(service, file, *chat) == 0
        assert [request.body["messages"] for request in service.requests] == [
            [{"role": "user", "content": "Two\ngirls."}],
            messages,
        ]


@pytest.mark.parametrize(("name", "quote"), [("prompts.txt", ""), ("prompts.jsonl", '"')])
def test_only_line_feeds_end_a_prompt(tmp_path: Path, name: str, quote: str) -> None:
    prompts = [f"a{mark}b" for mark in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e" if not quote or mark >= " "]
    lines = [f"{quote}{prompt}{quote}" for prompt in prompts]
    (tmp_path / name).write_bytes(("\ufeff" + "\n".join(lines) + "\r\n\r\n").encode())
    assert read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_a_load_test_without_files_or_ports_is_invalid(
    prompts: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(client: Client, path: str, body: bytes) -> None:
        raise OSError(number, "cannot open")

    monkeypatch.setattr(Client, "post", fail)
    file = tmp_path / "load.json"
    async with FakeService(lambda n, request: translation()) as service:
        assert await run_main(service, prompts, "--requests", "2", "--json", str(file)) == 4
    assert f"could not send requests: {os.strerror(number).lower()}; raise its limits" in capsys.readouterr().err
    assert not read_record(file).is_valid
    assert await asyncio.to_thread(main, ["load", "compare", str(file), str(file)]) == 4


async def test_a_sweep_stops_after_the_rate_at_which_the_goodput_falls(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service needs 4 ms for a request, one at a time: at most 250 requests/s."""
    busy_until = 0.0

    def one_at_a_time(n: int, request: Request) -> Reply:
        nonlocal busy_until
        now = time.perf_counter()
        busy_until = max(busy_until, now) + 0.004
        return translation(wait_s=busy_until - now)

    file = tmp_path / "load.json"
    async with FakeService(one_at_a_time) as service:
        arguments = ("--rates", "60:1560:300", "--duration", "200ms", "--objective", "latency=40ms")
        assert await run_main(service, prompts, *arguments, "--json", str(file)) == 0
    record = read_record(file)
    rates = [stage.rate for stage in record.stages]
    assert rates == [60, 360, 660, 960, 1260][: len(rates)] and len(rates) >= 2
    last, highest = record.stages[-1].figures, max(stage.figures.good_per_s for stage in record.stages)
    assert last.good_per_s < 0.95 * highest and last.good < last.succeeded == last.sent
    assert f"highest goodput: {highest:.1f} good requests/s" in capsys.readouterr().out


async def test_steps_follow_one_another_without_a_pause(prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    async with FakeService(lambda n, request: translation()) as service:
        steps = ("--steps", "20,200,20", "--duration", "150ms", "--json", str(file))
        assert await run_main(service, prompts, *steps) == 0
        expected = list(arrival_times([20, 200, 20], 0.15))
        assert len(service.requests) == len(expected)
    record = read_record(file)
    assert [(stage.rate, stage.start_s) for stage in record.stages] == [(20, 0), (200, 0.15), (20, 0.3)]
    for stage in record.stages:
        due = [due_s - stage.start_s for due_s in expected if stage.start_s <= due_s < stage.start_s + 0.15]
        assert sorted(stage.requests.due_s) == pytest.approx(due, abs=1e-4)


async def test_a_soak_compares_its_first_and_last_tenth(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = math.inf

    def slower_later(n: int, request: Request) -> Reply:
        nonlocal first
        first = min(first, time.perf_counter())
        return translation(wait_s=0.002 if time.perf_counter() < first + 0.3 else 0.4)

    async with FakeService(slower_later) as service:
        arguments = ("--soak", "--rate", "600", "--duration", "600ms", "--threshold", "100%")
        assert await run_main(service, prompts, *arguments) == 5
    output = capsys.readouterr()
    assert "last tenth after the first tenth" in output.out
    assert "figures became worse by more than 100%" in output.err


async def test_a_soak_that_is_too_short_fails(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeService(lambda n, request: translation()) as service:
        arguments = ("--soak", "--rate", "100", "--duration", "100ms")
        assert await run_main(service, prompts, *arguments) == 1
    assert "too few good requests for a comparison; run longer" in capsys.readouterr().err


async def test_a_load_test_that_lags_has_its_own_exit_status(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    async with FakeService(lambda n, request: whole(500, {})) as service:
        arguments = ("--rate", "100", "--requests", "20", "--max-lag", "0ms")
        assert await run_main(service, prompts, *arguments, "--json", str(file)) == 4
    assert "the run is invalid: the load test itself lagged" in capsys.readouterr().err
    assert not read_record(file).is_valid
    assert main(["load", "compare", str(file), str(file)]) == 4


def test_a_comparison_finds_a_slower_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, other = (str(tmp_path / name) for name in ("before.json", "after.json", "other.json"))
    for seed, (file, service_s, clients) in enumerate([(before, 0.005, 8), (after, 0.008, 8), (other, 0.005, 4)]):
        arguments = {"clients": clients, "url": f"http://host{seed}", "objectives": {}, "max_lag": 0.1}
        stages = [Stage(None, 0.0, queue(seed, service_s))]
        write_record(make_record(arguments, datetime.now(UTC), 0.1, stages), Path(file))
    assert main(["load", "compare", before, before]) == 0
    assert main(["load", "compare", before, after, "--threshold", "50%"]) == 5
    output = capsys.readouterr()
    assert re.search(r"latency p50, ms .* worse\n", output.out)
    assert "figures became worse by more than 50%" in output.err
    assert main(["load", "compare", before, after, "--threshold", "900%"]) == 0
    assert main(["load", "compare", after, before, "--threshold", "50%"]) == 0
    assert "better" in capsys.readouterr().out
    assert main(["load", "compare", before, other]) == 2
    assert capsys.readouterr().err == "error: clients differs: 8 and 4; compare runs of the same load\n"


def test_a_comparison_names_a_file_that_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.json"
    file.write_text('{"arguments": {}}', encoding="utf-8")
    assert main(["load", "compare", str(file), str(file)]) == 1
    assert "load.json is not a record of `sightline load --json` (versions: field required)" in capsys.readouterr().err
    assert main(["load", "compare", str(tmp_path / "no"), str(file)]) == 2


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10), ("500ms", 0.5), ("2m", 120), ("7", 7), ("1.5s", 1.5)])
def test_a_duration_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert duration(text) == seconds


def test_rates_are_a_list_or_a_range() -> None:
    assert rates("10,20,5") == [10, 20, 5]
    assert rates("0.1:0.5:0.1") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert rates("10:25:10") == [10, 20]


@pytest.mark.parametrize(
    ("line", "endpoint", "complaint"),
    [
        ('[{"role": "user", "content": "x"}]', "generate", "messages of a chat need --endpoint openai-chat"),
        ("[]", "openai-chat", "line 1 must be a JSON string or a list of messages"),
        ("3", "openai-chat", "line 1 must be a JSON string or a list of messages"),
        ("{", "openai-chat", "line 1 must be a JSON string or a list of messages"),
    ],
)
def test_a_wrong_line_of_prompts_is_named(
    line: str, endpoint: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n", encoding="utf-8")
    assert main(["load", "--prompts", str(file), "--endpoint", endpoint, "--model", "m"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    read_table(__file__, "mistakes"),
)
def test_invalid_arguments_are_rejected_before_any_load(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        sys.exit(main(["load", *arguments]))
    assert exit_status.value.code == 2
    assert complaint in capsys.readouterr().err
