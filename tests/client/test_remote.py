"""Requests over HTTP: retries, errors, timeouts and streams; the server has given answers."""

import asyncio
import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

import sightline
from sightline.client.remote import delay_s

TRANSLATED = {
    "model": "m",
    "outputs": [{"index": 0, "text": "Ein Hund."}],
    "usage": {"input_tokens": 3, "output_tokens": 3},
    "timings_ms": {"total": 1.0},
}
STREAM = {"content_type": "text/event-stream; charset=utf-8"}
OVERLOADED = {"error": {"code": "overloaded", "message": "Come back later.", "request_id": "abc"}}


@dataclass
class Server:
    """Answers requests with statuses, headers and bodies, one after another; the last one stays.

    It never answers with the status 0.
    """

    port: int = 0
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def answer(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers.append((status, {name.replace("_", "-"): value for name, value in headers.items()}, data))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/prefix"


@pytest.fixture
def server() -> Iterator[Server]:
    scripted = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            scripted.requests.append((self.path, dict(self.headers), body))
            status, headers, data = scripted.answers[0]
            del scripted.answers[: len(scripted.answers) > 1]
            if not status:
                scripted.has_ended.wait()
                return
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scripted.port = http.server_port
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield scripted
    scripted.has_ended.set()
    http.shutdown()
    http.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[sightline.Client]:
    with sightline.connect(server.url, "key-1", timeout_s=2.0, max_retries=2) as client:
        yield client


def test_a_request_has_the_path_the_key_and_the_given_arguments(server: Server, client: sightline.Client) -> None:
    server.answer(200, TRANSLATED)
    results = client.translate(("A dog.",), target_language="de", num_beams=2)
    assert [result.text for result in results] == ["Ein Hund."]
    assert (results.model, results.usage["input_tokens"], results.timings_ms["total"]) == ("m", 3, 1.0)
    ((path, headers, body),) = server.requests
    assert path == "/prefix/v1/translate"
    assert headers["authorization"] == "Bearer key-1"
    assert body == {"inputs": ["A dog."], "parameters": {"target_language": "de", "num_beams": 2}}


def test_arrays_and_ranges_are_lists_and_other_fields_stand_beside_the_parameters(
    server: Server, client: sightline.Client
) -> None:
    server.answer(200, {**TRANSLATED, "outputs": []})
    texts = np.array(["A dog.", "A cat."])
    client.attention(texts, targets=texts, layers=range(2), heads=np.arange(1), reduce="mean", num_beams=np.int64(2))
    client.generate(texts, on_empty="pass")
    (_, _, attention), (_, _, generate) = server.requests
    assert attention["inputs"] == attention["targets"] == generate["inputs"] == ["A dog.", "A cat."]
    assert (attention["layers"], attention["heads"], attention["reduce"]) == ([0, 1], [0], "mean")
    assert attention["parameters"] == {"num_beams": 2} and generate["on_empty"] == "pass"


@pytest.mark.parametrize("status", [429, 503])
def test_a_service_that_cannot_take_a_request_now_gets_it_again(
    server: Server, client: sightline.Client, status: int
) -> None:
    for _ in range(2):
        server.answer(status, OVERLOADED, retry_after="0")
    server.answer(200, TRANSLATED)
    assert client.translate("A dog.")[0].text == "Ein Hund."
    assert len(server.requests) == 3


@pytest.mark.parametrize(("named", "expected"), [(b"7", 7.0), (b"9999", 30.0), (b"", 4.0), (b"\xb2", 4.0)])
def test_the_delay_is_that_of_the_service(named: bytes, expected: float) -> None:
    assert delay_s(httpx.Response(429, headers=[(b"retry-after", named)] if named else None), 3) == expected


@pytest.mark.parametrize(
    ("status", "body", "code", "message", "request_id", "num_requests"),
    [
        (429, OVERLOADED, "overloaded", "Come back later.", "abc", 3),
        (422, OVERLOADED, "overloaded", "Come back later.", "abc", 1),
        (502, b"<h1>Bad Gateway</h1>", "http_error", "check the URL", None, 1),
        (404, {"error": "no"}, "http_error", "check the URL", None, 1),
        (301, b"", "http_error", "check the URL", None, 1),
        (200, b"<h1>Welcome</h1>", "http_error", "check the URL", None, 1),
        (200, {"hello": 1}, "http_error", "check the URL", None, 1),
        (200, [], "http_error", "check the URL", None, 1),
        (200, {**TRANSLATED, "outputs": [[]]}, "http_error", "check the URL", None, 1),
        (200, b"[" * 100_000, "http_error", "check the URL", None, 1),
        (400, {"error": dict.fromkeys(("code", "message", "request_id"))}, "http_error", "check the URL", None, 1),
    ],
)
def test_an_error_has_status_code_message_and_request_id(
    server: Server,
    client: sightline.Client,
    status: int,
    body: Any,
    code: str,
    message: str,
    request_id: str | None,
    num_requests: int,
) -> None:
    server.answer(status, body, retry_after="0")
    with pytest.raises(sightline.SightlineError) as caught:
        client.translate("A dog.")
    error = caught.value
    assert (error.status, error.code, error.request_id) == (status, code, request_id)
    assert message in error.message and str(status) in str(error) and code in str(error)
    assert len(server.requests) == num_requests


WRONG: dict[str, list[Any]] = {
    "url": ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", "http://[::1", 5],
    "api_key": ["clé", "a b", "", b"a"],
    "timeout_s": ["1", 0, -1.0, math.nan],
    "max_retries": ["1", None, -1, 1.5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_argument_that_cannot_be_used_is_named_at_once(name: str, value: Any) -> None:
    with pytest.raises(sightline.SightlineError, match=f"^{name} must ") as caught:
        sightline.connect(**{name: value})
    assert (caught.value.status, caught.value.code) == (None, "invalid_parameter")


@pytest.mark.parametrize(("name", "value"), [("SSL_CERT_FILE", "none"), ("ALL_PROXY", "ftp://none")])
def test_a_variable_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(sightline.SightlineError, match="check variables such as HTTPS_PROXY and SSL_CERT_FILE"):
        sightline.connect()


@pytest.mark.parametrize("value", [object(), [b"a"], math.nan, np.float32("inf"), {(1, 2): "a"}])
@pytest.mark.parametrize("argument", ["translate glossary", "embed inputs", "attention targets", "stream stop"])
def test_what_json_cannot_hold_is_named(server: Server, client: sightline.Client, argument: str, value: Any) -> None:
    operation, name = argument.split()
    with pytest.raises(sightline.SightlineError, match=f"^{name} cannot be sent as JSON: ") as caught:
        getattr(client, operation)(**{"inputs": "a", name: value})
    assert caught.value.code == "invalid_parameter" and not server.requests


def test_what_iterates_or_has_columns_is_a_list(server: Server, client: sightline.Client) -> None:
    server.answer(200, {**TRANSLATED, "outputs": []})
    frame = pytest.importorskip("pandas").DataFrame({"first": ["a", "b"], "second": ["c", "d"]})
    for inputs in (frame["first"], frame["first"].to_numpy(), iter("ab"), ("a", "b")):
        client.translate(inputs, glossary=MappingProxyType({"dog": "Hund"}))
    client.classify(frame)
    bodies = [body for _, _, body in server.requests]
    assert [body["inputs"] for body in bodies] == [["a", "b"]] * 4 + [[["a", "c"], ["b", "d"]]]
    assert bodies[0]["glossary"] == {"dog": "Hund"}


def test_a_service_that_cannot_be_reached_is_named() -> None:
    with sightline.connect("http://127.0.0.1:9") as client, pytest.raises(sightline.SightlineError) as caught:
        client.embed("A dog.")
    assert (caught.value.status, caught.value.code) == (None, "unreachable")
    assert "http://127.0.0.1:9 cannot be reached" in str(caught.value)


def test_a_response_that_does_not_come_is_a_timeout(server: Server) -> None:
    server.answer(0, b"")
    with (
        sightline.connect(server.url, timeout_s=0.05) as client,
        pytest.raises(sightline.SightlineError, match="raise timeout_s") as caught,
    ):
        client.translate("A dog.")
    assert caught.value.code == "timeout"


def events(*documents: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in documents)


def test_a_stream_yields_parts_and_the_reason_of_the_end(server: Server, client: sightline.Client) -> None:
    line_break = "\u2028 data: "  # no end of an event, and no field
    token = {"index": 0, "rank": 0, "token": {"id": 1}, "text": f"Ein{line_break}"}
    end = {"index": 0, "rank": 0, "finish_reason": "eos", "text": f"Ein{line_break}"}
    server.answer(200, events(token, end) + b"data: [DONE]\n\n", **STREAM)
    pieces = list(client.stream("A dog."))
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [(f"Ein{line_break}", None), ("", "eos")]
    assert pieces[0].raw["token"] == {"id": 1}


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        (b"event: error\n" + events(OVERLOADED), "overloaded"),
        (b"", "unreachable"),
        *[(part, "http_error") for part in (events([]), events({}), b"data: \xff\n\n")],
    ],
)
def test_a_stream_that_breaks_off_fails(server: Server, client: sightline.Client, rest: bytes, code: str) -> None:
    server.answer(200, events({"index": 0, "rank": 0, "text": "Ein"}) + rest, **STREAM)
    stream = iter(client.stream("A dog."))
    assert next(stream).text == "Ein"
    with pytest.raises(sightline.SightlineError) as caught:
        next(stream)
    assert caught.value.code == code


def test_the_asynchronous_operations_run_together(server: Server, client: sightline.Client) -> None:
    server.answer(200, TRANSLATED)

    async def run() -> list[str]:
        tasks = [asyncio.create_task(client.aio.translate(f"Dog {number}.")) for number in range(8)]
        return [result.text for (result,) in await asyncio.gather(*tasks)]

    for _ in range(2):  # on two event loops
        assert asyncio.run(run()) == ["Ein Hund."] * 8
    assert len(server.requests) == 16


def test_closing_ends_what_runs(server: Server) -> None:
    server.answer(0, b"")
    client = sightline.connect(server.url, timeout_s=None)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.translate, "A dog.")
        while not server.requests:
            time.sleep(0.01)
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match="the client was closed during the call"):
            call.result(10)
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.translate("A dog.")


def test_a_forked_process_needs_a_client_of_its_own(server: Server, client: sightline.Client) -> None:
    server.answer(200, TRANSLATED)
    process = os.fork()
    if not process:
        try:
            with pytest.raises(RuntimeError, match="belongs to the process that forked this one; make another one"):
                client.translate("A dog.")  # would wait for ever
            with sightline.connect(server.url) as other:
                os._exit(len(other.translate("A dog.")) - 1)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == 0


def test_a_stream_that_is_left_ends(server: Server, client: sightline.Client) -> None:
    server.answer(200, events({"index": 0, "rank": 0, "text": "Ein"}), content_length="9999", **STREAM)
    with contextlib.closing(iter(client.stream("A dog."))) as stream:  # type: ignore[type-var]
        assert next(stream).text == "Ein"
    server.answers.clear()
    server.answer(200, TRANSLATED)
    assert client.translate("A dog.")[0].text == "Ein Hund."
