"""Tests of the Locust file with the command line of Locust."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx

from lab.bench.server import serving

NAMES = {"/v1/generate", "/v1/generate (stream)", "/v1/attention", "/v1/encode"}


def run_locust(url: str, has_enough: Callable[[], bool]) -> tuple[int, dict[str, Any]]:
    """Run Locust until a condition is true, which is checked 20 times a second.

    Returns:
        The exit code, and the statistics of each request by name.
    """
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json", "--host", url]
    load = ["--users", "4", "--spawn-rate", "4", "--run-time", "10m"]
    with subprocess.Popen([*command, *load], stdout=subprocess.PIPE, text=True) as locust:
        while locust.poll() is None and not has_enough():
            with suppress(subprocess.TimeoutExpired):
                locust.wait(0.05)
        locust.send_signal(signal.SIGTERM)
        output, _ = locust.communicate()
    return locust.returncode, {one["name"]: one for one in json.loads(output)}


def test_all_tasks_of_the_users_succeed_on_a_real_service(bundle: Path) -> None:
    """At least one of 5 requests of 4 users is complete."""
    with serving(bundle.parent, threads=1, workers=1) as server:

        def has_enough() -> bool:
            metrics = httpx.get(f"{server.url}/metrics").text
            return all(
                sum(map(float, re.findall(rf'^sightline_http_requests_total{{.*"{route}".*}} (\S+)$', metrics, re.M)))
                >= 5
                for route in ("/v1/attention", "/v1/encode")
            )

        exit_code, figures = run_locust(server.url, has_enough)
    assert exit_code == 0, figures
    assert set(figures) == NAMES
    assert all(one["num_requests"] > 0 == one["num_failures"] for one in figures.values())
    assert figures["/v1/generate"]["num_requests"] > figures["/v1/encode"]["num_requests"]


class CutShort(BaseHTTPRequestHandler):
    """Respond to all requests with the beginning of a stream."""

    num_streams = 0

    def do_POST(self) -> None:
        CutShort.num_streams += b"stream" in self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"index":0}\n\nevent: error\ndata: {}\n\n')

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        pass


def test_a_stream_without_its_end_is_a_failure() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), CutShort) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        exit_code, figures = run_locust(url, lambda: CutShort.num_streams >= 5)
        server.shutdown()
        thread.join()
    assert exit_code == 1
    stream = figures.pop("/v1/generate (stream)")
    assert stream["num_failures"] == stream["num_requests"] > 0
    assert not any(one["num_failures"] for one in figures.values())
