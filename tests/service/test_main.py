"""`python -m sightline.service` as a process: start, end, exit codes, and modules that it never
loads.
"""

import contextlib
import http.client
import json
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import onnx
import pytest
from onnx import TensorProto, helper

from lab.bench.process import family_cpu_seconds
from lab.bench.server import free_port
from sightline import __version__
from sightline.base.bundle_files import read_bundle, record_files, write_manifest
from sightline.base.errors import UsageError
from sightline.base.text.tokenizer import read_tokenizer
from sightline.service.__main__ import check_one_runtime, main

IGNORED = "SIGHUP replaces workers, but this service is one process; restart it to read the bundles again"


@pytest.fixture
def folder(bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "bundles" / "toy")
    return tmp_path / "bundles"


@contextlib.contextmanager
def process(
    *arguments: str, program: Sequence[str] = ("-m", "sightline.service"), pipe_bytes: int = 1 << 16
) -> Iterator[subprocess.Popen[str]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIGHTLINE_")}
    environment["SIGHTLINE_WORKERS"] = "1"
    command = [sys.executable, *program, *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, pipesize=pipe_bytes, **pipes) as running:
        try:
            yield running
        finally:
            running.kill()


def lines_until(output: IO[str], message: str) -> list[dict[str, Any]]:
    lines = []
    for line in output:
        lines.append(json.loads(line))
        if lines[-1]["message"].startswith(message):
            return lines
    raise AssertionError(f"{message!r} was never logged: {lines}")


def ask(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


# `python -m sightline.service`, which prints the modules that it has loaded when it ends.
LISTING = """
import json, os, sys

def end(code, end=os._exit):
    print(json.dumps(sorted(sys.modules)), flush=True)
    end(code)

os._exit = end
from sightline.service.__main__ import main
main(sys.argv[1:])
"""


def test_it_starts_translates_and_ends_cleanly_at_sigterm_and_never_loads_torch(folder: Path) -> None:
    settings = ("--bundles", str(folder), "--port", "0", "--drain-s", "0.1", "--threads", "1")
    with process(*settings, program=("-c", LISTING)) as running:
        assert running.stdout is not None and running.stderr is not None
        begun = lines_until(running.stdout, "listening")
        # The port opens before the model is loaded.
        port = begun[-1]["port"]
        assert ask(port, "/health/live") == {"status": "live"}
        ready = (begun + lines_until(running.stdout, "ready"))[-1]
        assert (ready["model"], ready["provider"]) == ("toy", "cpu")
        assert ready["threads"] == {"encoder": 1, "decoder": 1}
        assert ask(port, "/health/ready") == {"status": "ready", "failed_models": []}
        response = ask(port, "/v1/generate", {"inputs": "A man sleeps.", "parameters": {"max_new_tokens": 8}})
        assert 0 < len(response["outputs"][0]["tokens"]) <= 8
        attention = ask(port, "/v1/attention", {"inputs": "A man sleeps.", "targets": "Ein Mann"})
        assert [one["kind"] for one in attention["outputs"][0]["maps"]] == ["encoder", "cross", "decoder"]
        assert ask(port, "/v1/encode", {"inputs": "A man sleeps."})["dimensions"] == 32
        running.send_signal(signal.SIGHUP)  # for workers, of which there are none
        (warning,) = [line for line in lines_until(running.stdout, IGNORED) if line["level"] == "warning"]
        assert warning["message"] == IGNORED
        running.send_signal(signal.SIGTERM)
        ended = lines_until(running.stdout, "ended")
        assert [line["message"] for line in ended if line["level"] != "debug"][-2:] == [
            "draining; a second signal ends at once",
            "ended",
        ]
        assert running.wait(timeout=25) == 0
        assert running.stderr.read() == ""
        names = {"torch", "onnx", "transformers", "sightline.model", "sightline.export", "sightline.service.server"}
        assert names & set(json.loads(running.stdout.read())) == {"sightline.service.server"}


def ask_until_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if ask(port, "/health/ready") == {"status": "ready", "failed_models": []}:
                return
        time.sleep(0.05)
    raise AssertionError("it is never ready")


def test_a_stalled_reader_of_the_log_blocks_neither_responses_nor_the_shutdown(folder: Path) -> None:
    settings = ("--bundles", str(folder), "--log-level", "debug", "--drain-s", "0", "--threads", "1")
    port = free_port()
    with process(*settings, "--port", str(port), pipe_bytes=4096) as running:
        ask_until_ready(port)  # nothing reads its standard output
        for _ in range(100):  # more lines than fit into the pipe
            assert ask(port, "/health/live") == {"status": "live"}
        response = ask(port, "/v1/generate", {"inputs": "A man sleeps.", "parameters": {"max_new_tokens": 8}})
        assert response["outputs"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=25) == 0


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_a_standard_stream_that_is_closed_or_whose_disk_is_full_has_no_effect(folder: Path, closed: str) -> None:
    port = free_port()
    command = (
        f"exec {sys.executable} -m sightline.service --bundles {folder} --port {port} --drain-s 0 --threads 1 {closed}"
    )
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            ask_until_ready(port)
            assert ask(port, "/v1/encode", {"inputs": "A man sleeps."})["dimensions"] == 32
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=25) == 0
        finally:
            running.kill()


# `python -m sightline.service` with an engine that hangs in a native call at its first step after
# loading.
HANGING = """
import sys, time
from sightline.service import __main__, server
from sightline.service.engine.engine import Engine

def load(*arguments, load=server.load_backend):
    backend = load(*arguments)
    Engine.step = lambda *_: time.sleep(600)
    return backend

server.load_backend = load
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_an_engine_that_hangs_ends_the_draining_process_long_before_the_shutdown_timeout(folder: Path) -> None:
    port = free_port()
    settings = ("--bundles", str(folder), "--port", str(port), "--threads", "1")
    # The shutdown timeout is the default of 30 s.
    times = ("--request-timeout-s", "1.5", "--queue-timeout-s", "1.5", "--drain-s", "0")
    with process(*settings, *times, program=("-c", HANGING)) as running, ThreadPoolExecutor() as calls:
        assert running.stdout is not None
        lines_until(running.stdout, "ready")
        body = {"inputs": "A man sleeps."}
        early = calls.submit(ask, port, "/v1/generate", body)
        time.sleep(1.4)
        late = calls.submit(ask, port, "/v1/generate", body)  # its deadline is later than the decision of the watchdog
        time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        lines_until(running.stdout, "a step of the engine does not end; the process ends")
        assert running.wait(timeout=25) == 1
        assert early.result()["error"]["code"] in {"deadline_exceeded", "engine_dead"}
        assert late.result()["error"]["code"] == "engine_dead"
        assert [json.loads(line)["message"] for line in running.stdout][-1] == "ended"


def make_endless(folder: Path, text: str) -> None:
    """Make the encoder of a bundle run without end if the source has the first token of `text`."""
    manifest = read_bundle(folder)
    assert manifest.encoder is not None
    path = folder / manifest.encoder.file
    token_id = read_tokenizer(folder / "tokenizer.json").encode(text, add_special_tokens=False)[0]
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        node.input[:] = ["lengths_after_loop" if name == "source_lengths" else name for name in node.input]
    scalar = helper.make_tensor_value_info("iteration", TensorProto.INT64, [])
    condition = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("is_on", "stays_on")]
    values = [helper.make_tensor_value_info(name, TensorProto.INT32, ["B"]) for name in ("lengths_in", "lengths_out")]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["is_on"], ["stays_on"]),
            helper.make_node("Identity", ["lengths_in"], ["lengths_out"]),
        ],
        "body",
        [scalar, condition[0], values[0]],
        [condition[1], values[1]],
    )
    numbers = {"endless_id": token_id, "endless_count": 1 << 62, "no_count": 0}
    model.graph.initializer.extend(helper.make_tensor(name, TensorProto.INT64, [], [n]) for name, n in numbers.items())
    nodes = [
        helper.make_node("Equal", ["source_ids", "endless_id"], ["is_endless"]),
        helper.make_node("Cast", ["is_endless"], ["are_endless"], to=TensorProto.INT64),
        helper.make_node("ReduceMax", ["are_endless"], ["any_endless"], keepdims=0),
        helper.make_node("Cast", ["any_endless"], ["has_endless"], to=TensorProto.BOOL),
        helper.make_node("Where", ["has_endless", "endless_count", "no_count"], ["count"]),
        helper.make_node("Loop", ["count", "", "source_lengths"], ["lengths_after_loop"], body=body),
        *model.graph.node,
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
    files = {**manifest.files, **record_files(folder, [manifest.encoder.file])}
    write_manifest(folder, manifest.model_copy(update={"files": files}))


def test_a_graph_that_does_not_end_is_ended_and_its_model_loaded_again_or_the_process_ends(folder: Path) -> None:
    make_endless(folder / "toy", "~")
    port = free_port()
    settings = ("--bundles", str(folder), "--port", str(port), "--threads", "1", "--drain-s", "0")
    times = ("--request-timeout-s", "1", "--queue-timeout-s", "1")
    fine, endless = {"inputs": "A man sleeps."}, {"inputs": "A man ~ sleeps."}
    with process(*settings, *times) as running, ThreadPoolExecutor() as calls:
        assert running.stdout is not None
        lines_until(running.stdout, "ready")
        before = ask(port, "/v1/encode", fine)
        early = calls.submit(ask, port, "/v1/encode", endless)
        time.sleep(0.8)
        late = calls.submit(ask, port, "/v1/encode", fine)  # its deadline is later than the decision
        lines_until(running.stdout, "a step of toy did not end by itself; the model is loaded again")
        assert early.result()["error"]["code"] in {"deadline_exceeded", "internal"}
        assert late.result()["error"]["code"] in {"loading", "deadline_exceeded"}
        while "error" in (again := ask(port, "/v1/encode", fine)):  # the call waits for the load, up to its deadline
            assert again["error"]["code"] == "loading"
        assert again["embeddings"] == before["embeddings"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            assert b'sightline_model_reloads_total{model_name="toy"} 1.0' in response.read()
        (folder / "toy" / "manifest.json").unlink()
        assert ask(port, "/v1/encode", endless)["error"]["code"] in {"deadline_exceeded", "internal"}
        lines_until(running.stdout, "toy cannot be loaded again; the process ends")
        assert running.wait(timeout=25) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_at_any_moment_ends_all_processes(folder: Path, workers: str) -> None:
    """From the start of Python, over loading, to requests in progress, which are answered."""
    outcomes, num_answered = [], 0
    for moment in range(20):
        port = free_port()
        command = ("--bundles", str(folder), "--port", str(port), "--drain-s", "0", "--workers", workers)
        with process(*command) as running, ThreadPoolExecutor() as calls:
            asked = []
            if moment < 14:
                time.sleep(0.2 * moment)
            else:
                ask_until_ready(port)
                asked = [calls.submit(ask, port, "/v1/generate", {"inputs": ["A man sleeps."] * 32}) for _ in range(4)]
                time.sleep(0.05 * (moment - 14))
            children = family_cpu_seconds(running.pid)
            running.send_signal(signal.SIGTERM)
            outcomes.append(running.wait(timeout=25))
            statuses = []
            for one in asked:
                with contextlib.suppress(OSError, http.client.HTTPException):  # the listener was closed before
                    answer = one.result()
                    # No call waits for the shutdown timeout, so this error is that of a late call.
                    assert "outputs" in answer or answer["error"]["code"] == "draining"
                    statuses.append(200 if "outputs" in answer else 503)
            # No connection of a call that the service had begun was cut.
            assert running.stdout is not None
            lines = [line for line in map(json.loads, running.stdout) if line.get("route") == "/v1/generate"]
            assert sorted(statuses) == sorted(line["status"] for line in lines)
            num_answered += statuses.count(200)
            wait_until_gone(pid for pid in children if pid != running.pid)
    # Before `main` has read the settings, the signal ends Python at once.
    num_early = next(number for number, outcome in enumerate(outcomes) if outcome == 0)
    assert outcomes == [-signal.SIGTERM] * num_early + [0] * (20 - num_early) and num_early < 8
    assert num_answered > 0


def wait_until_gone(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + 60
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"process {pid} is left"
            time.sleep(0.02)


def test_a_service_that_was_killed_under_load_starts_again_on_its_port(folder: Path) -> None:
    port = free_port()
    command = ("--bundles", str(folder), "--port", str(port), "--workers", "2", "--threads", "1")
    with process(*command) as running, ThreadPoolExecutor() as calls:
        ask_until_ready(port)
        asked = [calls.submit(ask, port, "/v1/generate", {"inputs": ["A man sleeps."] * 64}) for _ in range(8)]
        time.sleep(0.1)
        children = family_cpu_seconds(running.pid)
        running.kill()
        running.wait()
        for one in asked:
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = one.result()
                assert "outputs" in answer or answer["error"]["code"] == "draining"  # the workers notice at once
    wait_until_gone(children)
    with process(*command):
        ask_until_ready(port)


# `python -m sightline.service` with a load that takes two minutes.
LOADING = """
import sys, time
from sightline.service import __main__, server

server.load_backend = lambda *arguments: time.sleep(120)
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("signal_", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_while_models_load_ends_the_process_soon_with_0(folder: Path, signal_: signal.Signals) -> None:
    with process("--bundles", str(folder), "--port", "0", program=("-c", LOADING)) as running:
        assert running.stdout is not None
        port = lines_until(running.stdout, "listening")[-1]["port"]
        assert ask(port, "/health/ready")["error"]["code"] == "loading"
        running.send_signal(signal_)
        assert running.wait(timeout=25) == 0
        assert [json.loads(line)["message"] for line in running.stdout][-1] == "ended"


def test_on_a_terminal_the_first_lines_name_the_url_the_model_its_threads_and_rows_and_the_memory(folder: Path) -> None:
    terminal, end = pty.openpty()
    settings = ("--bundles", str(folder), "--port", "0", "--drain-s", "0", "--threads", "1", "--max-rows", "4")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIGHTLINE_")}
    environment["SIGHTLINE_WORKERS"] = "1"
    command = [sys.executable, "-m", "sightline.service", *settings]
    with subprocess.Popen(command, env=environment | {"NO_COLOR": "1"}, stdout=end) as running:
        os.close(end)
        with open(terminal, encoding="utf-8", newline="\n") as screen:
            shown = [re.sub(r"^\S+ info    ", "", screen.readline().rstrip()) for _ in range(3)]
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=25) == 0
    assert re.fullmatch(
        rf"Sightline {__version__} listens on (http://127\.0\.0\.1:\d+) \(documentation: \1/docs\) "
        "and loads its models",
        shown[0],
    )
    assert shown[1] == "ready: toy  en to de, float32 on cpu, 4 rows, threads: encoder 1, decoder 1"
    assert re.fullmatch(r"serving 1 model; default: toy; memory: [0-9.]+ [MG]B now, up to .* for responses", shown[2])


def test_a_bundle_that_cannot_be_served_ends_the_process_with_3_and_one_line(folder: Path) -> None:
    next(folder.glob("*/*.onnx")).write_bytes(b"not a graph")
    with process("--bundles", str(folder), "--port", "0") as running:
        output, errors = running.communicate(timeout=120)
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
        output, errors = running.communicate(timeout=120)
        assert (running.returncode, output) == (2, "")
        assert errors.startswith("error: --port must be a whole number from 0 to 65535, got 'x'")
        assert errors.count("\n") == 1
        assert errors.endswith("; starting again will not help until this is fixed\n")


def test_a_port_that_is_taken_ends_the_process_with_3(folder: Path) -> None:
    # Two services could share the port if this one allowed it, too.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as first:
        with process("--bundles", str(folder), "--port", str(first.getsockname()[1])) as second:
            output, _ = second.communicate(timeout=120)
        assert second.returncode == 3
        assert "address already in use" in output
        assert "starting again will not help" in output.splitlines()[-1]


@pytest.mark.parametrize("installed", [[], ["onnxruntime", "onnxruntime-gpu"]])
def test_it_starts_with_exactly_one_onnx_runtime(installed: list[str]) -> None:
    check_one_runtime(["onnxruntime-gpu"])
    with pytest.raises(UsageError, match="extra 'cpu' or the extra 'gpu'"):
        check_one_runtime(installed)


def test_a_limit_of_open_files_that_is_too_low_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (63, 63))
    assert main([]) == 2
    assert "error: the process may open only 63 files, and needs 64" in capsys.readouterr().err
