"""The number of functions that one call enters on the event loop's thread: few layers keep a call
cheap.
"""

import contextlib
import gc
import http.client
import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import service
from tests.service.conftest import Serve, wait_until

MAX_FUNCTIONS, MAX_FILES = 72, 16
SERVICE = str(Path(service.__file__).parent) + "/"
NAMELESS = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>", "<lambda>")


def test_a_call_enters_few_functions_in_few_files(serve: Serve) -> None:
    entered: set[tuple[str, str]] = set()
    loop_thread: list[int] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path, code = frame.f_code.co_filename, frame.f_code
        is_ours = path.startswith(SERVICE)
        if event == "call" and is_ours and threading.get_ident() in loop_thread and code.co_name not in NAMELESS:
            entered.add((path, code.co_qualname))

    body = json.dumps({"inputs": "a dog", "parameters": {"max_new_tokens": 1}}).encode()
    head = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    threading.setprofile(note)  # of threads that start from here on
    try:
        with serve() as wire, wire.connect() as connection:
            loop_thread.append(wire.thread.ident or 0)
            for _ in range(3):  # the first call fills caches
                entered.clear()
                connection.sendall(head % len(body) + body)
                received = b""
                while b"timings_ms" not in received:
                    received += connection.recv(65536)
                wait_until(lambda: any(name == "CallLog._log_end" for _, name in entered))
            found = sorted(entered)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    files = {path for path, _ in found}
    assert len(found) <= MAX_FUNCTIONS, found
    assert len(files) <= MAX_FILES, files


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/generate", {"inputs": "a dog"}, 200),
        ("/v1/generate", {"inputs": ["a dog", "a"], "parameters": {"num_beams": 2, "return_attention": True}}, 200),
        ("/v1/generate", {"inputs": "a dog", "stream": True}, 200),
        ("/v1/attention", {"inputs": "a dog"}, 200),
        ("/v1/encode", {"inputs": "a dog"}, 200),
        ("/v1/score", {"inputs": "a dog", "targets": "a"}, 200),
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a dog"}]}, 400),
        ("/v1/completions", {"model": "fake", "prompt": "a dog", "stream": True}, 200),
        ("/v1/generate", {"inputs": "a dog", "parameters": {"num_beams": -1}}, 422),
        ("/v1/generate", {"inputs": "a dog " * 100}, 422),
        ("/v1/nothing", {}, 404),
    ],
)
def test_a_call_leaves_nothing_to_the_garbage_collector(
    serve: Serve, path: str, body: dict[str, Any], status: int
) -> None:
    """A call in a reference cycle keeps its results in memory, and collecting such cycles takes a
    third of the time of a busy service.
    """
    data = json.dumps(body).encode()
    with serve() as wire, contextlib.closing(http.client.HTTPConnection("127.0.0.1", wire.port)) as connection:

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
