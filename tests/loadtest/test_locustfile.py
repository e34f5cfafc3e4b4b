"""Tests of the Locust file with the command line of Locust."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.bench.server import serving

NAMES = {"/v1/generate", "/v1/generate (stream)", "/v1/attention", "/v1/encode"}


def run_locust(url: str, seconds: int) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the statistics of each request by name."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json", "--host", url]
    load = ["--users", "4", "--spawn-rate", "4", "--run-time", f"{seconds}s"]
    done = subprocess.run([*command, *load], capture_output=True, text=True, check=False)
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)}


def test_all_tasks_of_the_users_succeed_on_a_real_service(bundle: Path) -> None:
    with serving(bundle.parent, threads=1, workers=1) as server:
        exit_code, figures = run_locust(server.url, 2)
    assert exit_code == 0, figures
    assert set(figures) == NAMES
    assert all(one["num_requests"] > 0 == one["num_failures"] for one in figures.values())
    assert figures["/v1/generate"]["num_requests"] > figures["/v1/encode"]["num_requests"]


class CutShort(BaseHTTPRequestHandler):
    """Respond to all requests with the beginning of a stream."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"index":0}\n\nevent: error\ndata: {}\n\n')

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        pass


def test_a_stream_without_its_end_is_a_failure() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), CutShort) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        exit_code, figures = run_locust(f"http://127.0.0.1:{server.server_port}", 1)
        server.shutdown()
        thread.join()
    assert exit_code == 1
    stream = figures.pop("/v1/generate (stream)")
    assert stream["num_failures"] == stream["num_requests"] > 0
    assert not any(one["num_failures"] for one in figures.values())
