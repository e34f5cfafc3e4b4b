"""`python -m service` as a process: its start, its end, its exit codes, and what it never loads."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from bench.server import free_port
from service import __version__
from service.__main__ import check_one_runtime, main
from service.settings import SettingsError


@pytest.fixture
def folder(bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "bundles" / "toy")
    return tmp_path / "bundles"


@contextlib.contextmanager
def process(*arguments: str, program: Sequence[str] = ("-m", "service")) -> Iterator[subprocess.Popen[str]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIGHTLINE_")}
    command = [sys.executable, *program, *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def lines_until(output: IO[str], message: str) -> list[dict[str, Any]]:
    lines = []
    for line in output:
        lines.append(json.loads(line))
        if lines[-1]["message"] == message:
            return lines
    raise AssertionError(f"{message!r} was never logged: {lines}")


def ask(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


def test_it_starts_translates_and_ends_cleanly_at_sigterm(folder: Path) -> None:
    with process("--bundles", str(folder), "--port", "0", "--drain-s", "0.1", "--threads", "1") as running:
        assert running.stdout is not None and running.stderr is not None
        begun = lines_until(running.stdout, "listening")
        # The port is open before the model is there, and says so.
        port = begun[-1]["port"]
        assert ask(port, "/health/live") == {"status": "live"}
        ready = (begun + lines_until(running.stdout, "ready"))[-1]
        assert (ready["model"], ready["provider"]) == ("toy", "cpu")
        assert ready["threads"] == {"encoder": 1, "decoder": 1}
        assert ask(port, "/health/ready") == {"status": "ready"}
        answer = ask(port, "/v1/generate", {"inputs": "A man sleeps.", "parameters": {"max_new_tokens": 8}})
        assert 0 < len(answer["outputs"][0]["tokens"]) <= 8
        attention = ask(port, "/v1/attention", {"input": "A man sleeps.", "target": "Ein Mann"})
        assert [one["kind"] for one in attention["maps"]] == ["encoder", "cross", "decoder"]
        assert ask(port, "/v1/encode", {"inputs": "A man sleeps."})["dimensions"] == 32
        running.send_signal(signal.SIGTERM)
        ended = lines_until(running.stdout, "ended")
        assert [line["message"] for line in ended if line["level"] != "debug"][-2:] == [
            "draining; a second signal ends at once",
            "ended",
        ]
        assert running.wait(timeout=20) == 0
        assert running.stderr.read() == ""


def ask_until_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if ask(port, "/health/ready") == {"status": "ready"}:
                return
        time.sleep(0.05)
    raise AssertionError("it is never ready")


def test_a_reader_of_the_log_that_stops_reading_holds_up_neither_answers_nor_the_end(folder: Path) -> None:
    settings = ("--bundles", str(folder), "--log-level", "debug", "--drain-s", "0", "--threads", "1")
    port = free_port()
    with process(*settings, "--port", str(port)) as running:
        ask_until_ready(port)  # and nobody ever reads its standard output
        for _ in range(600):  # lines of more than the pipe's 64 KiB
            assert ask(port, "/health/live") == {"status": "live"}
        answer = ask(port, "/v1/generate", {"inputs": "A man sleeps.", "parameters": {"max_new_tokens": 8}})
        assert answer["outputs"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=10) == 0


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_does_no_harm(folder: Path, closed: str) -> None:
    port = free_port()
    command = f"exec {sys.executable} -m service --bundles {folder} --port {port} --drain-s 0 --threads 1 {closed}"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            ask_until_ready(port)
            assert ask(port, "/v1/encode", {"inputs": "A man sleeps."})["dimensions"] == 32
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=10) == 0
        finally:
            running.kill()


# `python -m service`, whose engine hangs in a native call at its first step that is no rehearsal.
HANGING = """
import sys, time
from service import __main__
from service.http import server
from service.engine.engine import Engine

def load(*arguments, load=server.load_backend):
    backend = load(*arguments)
    Engine.step = lambda engine: time.sleep(600)
    return backend

server.load_backend = load
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("is_draining", [False, True])
def test_an_engine_that_hangs_ends_the_process_within_two_seconds_of_the_decision(
    folder: Path, is_draining: bool
) -> None:
    port = free_port()
    settings = ("--bundles", str(folder), "--port", str(port), "--threads", "1")
    # The time to finish is 30 s, as it is by default.
    times = ("--request-timeout-s", "1.5", "--queue-timeout-s", "1.5", "--drain-s", "0")
    with process(*settings, *times, program=("-c", HANGING)) as running, ThreadPoolExecutor() as calls:
        assert running.stdout is not None
        lines_until(running.stdout, "ready")
        body = {"inputs": "A man sleeps."}
        early = calls.submit(ask, port, "/v1/generate", body)
        time.sleep(1.2)
        late = calls.submit(ask, port, "/v1/generate", body)  # its time is not over when the watchdog's is
        if is_draining:
            time.sleep(0.1)
            running.send_signal(signal.SIGTERM)
        lines_until(running.stdout, "a step of the engine does not end; the process ends")
        decided = time.monotonic()
        assert running.wait(timeout=20) == 1
        assert time.monotonic() - decided < 2
        assert early.result()["error"]["code"] in {"deadline_exceeded", "engine_dead"}
        assert late.result()["error"]["code"] == "engine_dead"
        assert [json.loads(line)["message"] for line in running.stdout][-1] == "ended"


def test_a_second_signal_ends_the_process_at_once_with_1(folder: Path) -> None:
    with process("--bundles", str(folder), "--port", "0", "--drain-s", "60", "--threads", "1") as running:
        assert running.stdout is not None
        lines_until(running.stdout, "ready")
        running.send_signal(signal.SIGTERM)
        lines_until(running.stdout, "draining; a second signal ends at once")
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=5) == 1


def test_a_bundle_that_cannot_be_served_ends_the_process_with_3_and_one_line(folder: Path) -> None:
    next(folder.glob("*/*.onnx")).write_bytes(b"not a graph")
    with process("--bundles", str(folder), "--port", "0") as running:
        output, errors = running.communicate(timeout=30)
        assert running.returncode == 3
        problems = [line for line in map(json.loads, output.splitlines()) if line["level"] == "error"]
        assert len(problems) == 1
        assert "SHA-256" in problems[0]["message"]
        last = json.loads(output.splitlines()[-1])
        assert last["message"] == "ended; starting again will not help until the cause is removed"
        assert last["exit_code"] == 3
        assert errors == ""


def test_settings_that_cannot_be_used_end_the_process_with_2_and_one_line() -> None:
    with process("--port", "x") as running:
        output, errors = running.communicate(timeout=30)
        assert (running.returncode, output) == (2, "")
        assert errors.startswith("error: SIGHTLINE_PORT (--port): ") and errors.count("\n") == 1
        assert errors.endswith("; starting again will not help until this is fixed\n")


def test_a_port_that_is_taken_ends_the_process_with_3(folder: Path) -> None:
    with process("--bundles", str(folder), "--port", "0") as first:
        assert first.stdout is not None
        port = lines_until(first.stdout, "listening")[-1]["port"]
        with process("--bundles", str(folder), "--port", str(port)) as second:
            output, _ = second.communicate(timeout=30)
            assert second.returncode == 3
            assert "address already in use" in output
            assert "starting again will not help" in output.splitlines()[-1]


def test_the_service_never_loads_torch() -> None:
    program = (
        "import sys; from service.http.server import serve; from service.__main__ import main; "
        "print([name for name in ('torch', 'onnx', 'transformers', 'model', 'export') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("installed", [[], ["onnxruntime", "onnxruntime-gpu"]])
def test_it_starts_with_exactly_one_onnx_runtime(installed: list[str]) -> None:
    check_one_runtime(["onnxruntime-gpu"])
    with pytest.raises(SettingsError, match="extra 'cpu' or the extra 'gpu'"):
        check_one_runtime(installed)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SIGHTLINE_PROT", "1")
    assert main([]) == 2
    assert "SIGHTLINE_PROT" in capsys.readouterr().err


def test_the_version_is_that_of_the_project() -> None:
    assert f'version = "{__version__}"' in Path("pyproject.toml").read_text(encoding="utf-8")
