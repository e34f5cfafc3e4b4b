"""The number of functions that a call enters in the main thread: few layers keep a call cheap."""

import contextlib
import gc
import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab.bench.server import free_port
from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Serve, chat_backend, wait_until, with_languages
from tests.support.tables import read_table

MAX_FUNCTIONS, MAX_FILES = 111, 23  # they may only fall
# The service, whose main thread notes the functions of the product that it enters. SIGUSR1 begins a
# round of calls, SIGUSR2 writes the smallest one: regular work of the service may fall into others.
PROGRAM = """
import json, pathlib, signal, sys
import sightline
from sightline.service.__main__ import main

product, rounds = str(pathlib.Path(sightline.__file__).parent), [set()]

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(product):
        rounds[-1].add((frame.f_code.co_filename, frame.f_code.co_qualname))

def write(*_):
    pathlib.Path(sys.argv[1]).write_text(json.dumps(sorted(min(rounds[2:], key=len))))

signal.signal(signal.SIGUSR1, lambda *_: rounds.append(set()))
signal.signal(signal.SIGUSR2, write)
sys.setprofile(note)
main(sys.argv[2:])
"""


def test_a_call_and_a_health_check_enter_few_functions_in_few_files(tmp_path: Path) -> None:
    (tmp_path / "multi30k-en-de").symlink_to(Path("bundles/multi30k-en-de").absolute())
    written, port = tmp_path / "entered.json", free_port()
    options = ["--bundles", str(tmp_path), "--port", str(port), "--workers", "1", "--threads", "1"]
    command = [sys.executable, "-c", PROGRAM, str(written), *options]

    def ask(path: str, body: Any = None) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            with contextlib.suppress(ConnectionRefusedError):  # until it listens
                headers = {"Content-Type": "application/json"}
                connection.request("GET" if body is None else "POST", path, json.dumps(body), headers)
                response = connection.getresponse()
                response.read()
                return response.status
            return 0

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        wait_until(lambda: ask("/health/ready") == 200)
        for _ in range(5):  # the calls of the first round fill caches
            running.send_signal(signal.SIGUSR1)
            assert ask("/v1/generate", {"inputs": "A man.", "parameters": {"max_new_tokens": 1}}) == 200
            assert ask("/health/ready") == 200
        running.send_signal(signal.SIGUSR2)
        wait_until(written.exists)
        running.kill()
    functions = [tuple(entry) for entry in json.loads(written.read_text("utf-8"))]
    files = {path for path, _ in functions}
    assert len(functions) <= MAX_FUNCTIONS, functions
    assert len(files) <= MAX_FILES, files


@pytest.mark.parametrize(("path", "body", "status"), read_table(__file__))
def test_a_call_leaves_nothing_to_the_garbage_collector(
    serve: Serve, make_backend: MakeBackend, tokenizer: TextTokenizer, path: str, body: dict[str, Any], status: int
) -> None:
    """A call in a reference cycle keeps its results and its model in memory, and collecting such
    cycles takes a third of the time of a busy service.
    """
    data = json.dumps(body).encode()
    backend = chat_backend(tokenizer) if "messages" in body else with_languages(make_backend(), fake="en-de")
    with serve(backend) as wire, contextlib.closing(http.client.HTTPConnection("127.0.0.1", wire.port)) as connection:

        def call() -> None:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            assert response.status == status, content

        for _ in range(3):  # the first call fills caches
            call()
        time.sleep(0.1)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(4):
                call()
            time.sleep(0.1)
            gc.collect()
            assert [type(one).__qualname__ for one in gc.garbage] == []
        finally:
            gc.set_debug(0)
            gc.enable()
            gc.garbage.clear()
