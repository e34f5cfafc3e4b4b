"""Shutdown in two stages, on a real socket."""

import asyncio
import errno
import logging
import re
import signal
import socket
import threading
import time
from typing import Any

import orjson
import pytest

from sightline.service import health_check, server
from sightline.service.api.endpoint import Call, Endpoint
from sightline.service.http.http_call import HttpCall
from sightline.service.server import bind
from sightline.service.settings import Settings
from tests.service.api.test_streaming import large_response
from tests.service.conftest import MakeBackend, Serve, Wire, add_endpoint, read_all, wait_until
from tests.support.fake_runner import Faults

LONG = {"min_new_tokens": 40, "max_new_tokens": 40}
STALLED = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"


def terminate(wire: Wire) -> None:
    """Do the same as the process's signal handler."""
    wire.server.handle_exit(signal.SIGTERM, None)


def wait_for_the_end(wire: Wire) -> None:
    wire.thread.join(timeout=30)
    assert not wire.thread.is_alive()


def post_in_thread(wire: Wire, body: Any, responses: list[tuple[int, Any]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: responses.append(wire.post("/v1/generate", body)))
    thread.start()
    return thread


def test_the_drain_window_serves_requests_and_is_not_ready(serve: Serve, make_backend: MakeBackend) -> None:
    with serve(make_backend(step_s=0.02), drain_s=60) as wire:
        connection = wire.http()
        content = orjson.dumps({"inputs": "x", "stream": True, "parameters": LONG})
        connection.request("POST", "/v1/generate", content, {"Content-Type": "application/json"})
        stream = connection.getresponse()
        responses: list[tuple[int, Any]] = []
        unary = post_in_thread(wire, {"inputs": "y", "parameters": LONG}, responses)
        wait_until(lambda: wire.backend.engines[0].num_running == 2)
        terminate(wire)
        status, body = wire.get("/health/ready")
        assert (status, orjson.loads(body)["error"]["code"]) == (503, "draining")
        assert orjson.loads(wire.get("/")[1])["status"] == "draining"
        late = wire.http()
        late.request("POST", "/v1/generate", orjson.dumps({"inputs": "z"}), {"Content-Type": "application/json"})
        response = late.getresponse()
        assert (response.status, response.headers["connection"]) == (200, "close")
        late.close()
        assert wire.get("/health/live")[0] == 200
        wire.server.should_exit = True  # as at the end of the window
        assert stream.read().endswith(b"data: [DONE]\n\n")
        unary.join()
        assert responses[0][0] == 200
        wait_for_the_end(wire)
        assert wire.server.exit_code == 0
        connection.close()


def test_an_interrupt_from_the_keyboard_has_no_drain_window(serve: Serve) -> None:
    with serve(drain_s=60.0) as wire:
        wire.server.handle_exit(signal.SIGINT, None)
        wait_for_the_end(wire)
        assert wire.server.exit_code == 0


def test_the_listener_closes_after_the_drain_window(serve: Serve) -> None:
    with serve(drain_s=0.1) as wire:
        port = wire.port
        terminate(wire)
        wire.thread.join(timeout=30)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_requests_that_do_not_finish_in_time_get_the_error_draining(serve: Serve, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    with serve(make_backend(faults=Faults(hang=hang)), drain_s=0, shutdown_timeout_s=2) as wire:
        responses: list[tuple[int, Any]] = []
        unary = post_in_thread(wire, {"inputs": "x"}, responses)
        wait_until(lambda: wire.backend.engines[0].num_running == 1)
        started = time.monotonic()
        terminate(wire)
        unary.join(timeout=30)
        wait_for_the_end(wire)
        assert time.monotonic() - started < 5  # two to finish, one to give up the call that hangs, and not that twice
        hang.set()
        assert (responses[0][0], responses[0][1]["error"]["code"]) == (503, "draining")


def test_idle_connections_and_stalled_uploads_do_not_delay_the_shutdown(serve: Serve) -> None:
    settings = {"drain_s": 0, "client_timeout_s": 0.3, "shutdown_timeout_s": 60}
    with serve(**settings) as wire, wire.connect() as silent, wire.connect() as stalled:
        idle = wire.http()
        idle.request("GET", "/health/live")
        idle.getresponse().read()
        stalled.sendall(STALLED)
        wait_until(lambda: len(wire.server.server_state.connections) == 3)
        terminate(wire)
        wait_for_the_end(wire)
        assert silent.recv(1) == b""
        idle.close()


def test_an_upload_that_outlasts_the_shutdown_timeout_gets_the_error_draining(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESPONSE_S", 1)
    with serve(drain_s=0, shutdown_timeout_s=0.1, client_timeout_s=60) as wire, wire.connect() as stalled:
        stalled.sendall(STALLED)
        wait_until(lambda: len(wire.server.server_state.tasks) == 1)
        terminate(wire)
        response = read_all(stalled)
        assert response.startswith(b"HTTP/1.1 503 ") and b'"code":"draining"' in response
        wait_for_the_end(wire)


def test_responses_cut_by_the_shutdown_are_one_log_line_each_without_a_traceback(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "RESPONSE_S", 1)
    caplog.set_level(logging.INFO)
    with serve(drain_s=0, shutdown_timeout_s=0.1, client_timeout_s=60) as wire, large_response(wire) as client:
        wait_until(lambda: bool(wire.backend.runners[0].num_steps))
        wire.wait_idle()
        time.sleep(0.3)  # until all buffers on the way are full
        terminate(wire)
        wait_for_the_end(wire)
        head, _, content = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"content-length: %d" % len(content) not in head
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    (call,) = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert (call["route"], call["status"], call["code"]) == ("/v1/generate", 200, "draining")


def test_a_bug_after_the_head_of_a_response_logs_one_traceback_and_closes_the_connection(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def bug(call: Call) -> None:
        assert isinstance(call, HttpCall)
        await call.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await call.send({"type": "http.response.body", "body": b"12345", "more_body": True})
        raise RuntimeError("a mistake")

    with serve() as wire:
        add_endpoint(wire.app, Endpoint("GET", "/bug", bug))
        with wire.connect() as client:
            client.sendall(b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_all(client).endswith(b"\r\n\r\n12345")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == ["a call failed"]


def test_a_second_signal_ends_the_service_at_once(serve: Serve) -> None:
    with serve(drain_s=60) as wire:
        terminate(wire)
        assert wire.exit_codes == []
        terminate(wire)
        assert wire.exit_codes == [1]


def test_a_shutdown_while_loading_is_orderly(serve: Serve, make_backend: MakeBackend) -> None:
    may_load = threading.Event()
    with serve(make_backend(wait_for=may_load), drain_s=0) as wire:
        terminate(wire)
        may_load.set()
        wait_for_the_end(wire)
        assert wire.server.exit_code == 0


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_all_interfaces_are_those_of_ipv6_and_of_ipv4(monkeypatch: pytest.MonkeyPatch, *, has_ipv6: bool) -> None:
    create = socket.socket

    def without_ipv6(family: int = -1, *arguments: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create(family, *arguments)

    if not has_ipv6:
        monkeypatch.setattr(socket, "socket", without_ipv6)
    (listener,) = asyncio.run(bind(Settings(host="::", port=0)))
    monkeypatch.undo()
    with listener:
        listener.listen()
        for address in ("127.0.0.1", "::1")[: 1 + has_ipv6]:
            socket.create_connection((address, listener.getsockname()[1]), timeout=60).close()


@pytest.mark.parametrize(
    ("settings", "shown", "names"),
    [
        ({"host": '"127.0.0.1"'}, """'"127.0.0.1"', port 8000""", "SIGHTLINE_HOST and SIGHTLINE_PORT"),
        ({"host": "127.0.0.1\r"}, r"'127.0.0.1\r', port 8000", "SIGHTLINE_HOST and SIGHTLINE_PORT"),
        ({"host": "a" * 70}, f"'{'a' * 70}', port 8000", "SIGHTLINE_HOST and SIGHTLINE_PORT"),
        ({"host": "192.0.2.1"}, "'192.0.2.1', port 8000", "SIGHTLINE_HOST and SIGHTLINE_PORT"),
        ({"port": 0, "admin_address": "192.0.2.1:9"}, "'192.0.2.1', port 9", "SIGHTLINE_ADMIN_ADDRESS"),
    ],
)
def test_an_address_that_cannot_be_used_names_its_setting(settings: Any, shown: str, names: str) -> None:
    with pytest.raises(OSError, match=re.escape(f"cannot listen on {shown} ({names}): ")):
        asyncio.run(bind(Settings(**settings)))


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "0.0.0.0", "localhost"])
def test_the_health_check_finds_the_service_and_uses_no_proxy(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("SIGHTLINE_HOST", host)
    with serve(host=host) as wire:
        monkeypatch.setenv("SIGHTLINE_PORT", str(wire.port))
        assert health_check.main() == 0
        wire.app.state.service.begin_drain()
        assert health_check.main() == 1
    assert health_check.main() == 1
