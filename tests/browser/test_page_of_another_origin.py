"""Tests of a page in a real browser whose script calls the service. They need Chromium."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from lab.bench.server import RunningServer, serving

pytestmark = pytest.mark.browser

TEXT = "A man sleeps."
PAGE = """<!doctype html><title>A page</title><script>
async function ask(url, body, headers) {
  try {
    const response = await fetch(url, {
      method: "POST", headers: {"Content-Type": "application/json", ...headers}, body: JSON.stringify(body)
    });
    const pieces = [], decoder = new TextDecoder(), reader = response.body.getReader();
    for (let read = await reader.read(); !read.done; read = await reader.read())
      pieces.push(decoder.decode(read.value, {stream: true}));
    return {status: response.status, id: response.headers.get("X-Request-Id"), pieces};
  } catch (error) {
    return {error: error.name};
  }
}
</script>"""


class PageHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        pass


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Serve the page and yield its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), PageHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(chromium: Any, origin: str) -> Any:
    page = chromium.new_page()
    page.goto(origin)
    return page


@pytest.fixture(scope="module")
def allowing(bundle: Path, origin: str) -> Iterator[RunningServer]:
    origins = f"https://page.example,{origin}"
    with serving(bundle.parent, workers=1, cors_origins=origins, max_body_bytes=2000) as server:
        yield server


@pytest.fixture(scope="module")
def refusing(bundle: Path) -> Iterator[RunningServer]:
    """A service that allows no page, by default."""
    with serving(bundle.parent, workers=1) as server:
        yield server


def fetch_from(page: Any, server: RunningServer, body: Any, path: str = "/v1/generate", **headers: str) -> Any:
    """Call the service from the page's script and return the script's result."""
    return page.evaluate("([url, body, headers]) => ask(url, body, headers)", [server.url + path, body, headers])


def fetch_directly(server: RunningServer, body: Any) -> str:
    request = Request(f"{server.url}/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as response:
        return str(response.read().decode())


def num_calls(server: RunningServer, route: str) -> int:
    with urlopen(f"{server.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in lines
        if line.startswith(f'sightline_http_requests_total{{route="{route}"')
    )


def test_a_page_of_an_allowed_origin_gets_the_response(page: Any, allowing: RunningServer) -> None:
    headers = {"Authorization": "Bearer none", "X-Request-Id": "from-a-page", "X-Request-Timeout-Ms": "20000"}
    got = fetch_from(page, allowing, {"inputs": TEXT}, **headers)
    assert (got["status"], got["id"]) == (200, "from-a-page")
    expected = json.loads(fetch_directly(allowing, {"inputs": TEXT}))
    assert json.loads("".join(got["pieces"]))["outputs"] == expected["outputs"]


def test_the_page_reads_a_stream_while_it_arrives(page: Any, allowing: RunningServer) -> None:
    body = {"inputs": [TEXT] * 32, "stream": True, "parameters": {"min_new_tokens": 60}}
    for _ in range(20):  # a busy browser may read a short stream at once
        got = fetch_from(page, allowing, body)
        if len(got["pieces"]) > 1:
            break
    assert len(got["pieces"]) > 1
    *events, done, rest = "".join(got["pieces"]).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    written = [json.loads(event.removeprefix("data: ")) for event in events]
    for index in range(32):
        *new, last = [event["text"] for event in written if event["index"] == index]
        assert "".join(new) == last != ""


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/nothing", {}, 404, "not_found"),
        ("/v1/generate", {"inputs": "x" * 3000}, 413, "body_too_large"),
        ("/v1/generate", {"inputs": ""}, 422, "empty_input"),
    ],
)
def test_the_page_reads_errors(
    page: Any, allowing: RunningServer, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    got = fetch_from(page, allowing, body, path)
    error = json.loads("".join(got["pieces"]))["error"]
    assert (got["status"], error["code"], error["request_id"]) == (status, code, got["id"])


def test_any_page_is_allowed_if_any_origin_is(page: Any, bundle: Path) -> None:
    with serving(bundle.parent, workers=1, cors_origins="*") as server:
        assert fetch_from(page, server, {"inputs": TEXT})["status"] == 200


def test_a_page_of_another_origin_gets_no_response_and_runs_no_call(
    page: Any, bundle: Path, refusing: RunningServer
) -> None:
    with serving(bundle.parent, workers=1, cors_origins="https://page.example") as other:
        for server in (refusing, other):
            assert fetch_from(page, server, {"inputs": TEXT}) == {"error": "TypeError"}
            assert num_calls(server, "/v1/generate") == 0
            fetch_directly(server, {"inputs": TEXT})
            assert num_calls(server, "/v1/generate") == 1


@pytest.mark.parametrize("name", ["allowing", "refusing"])
def test_only_the_sites_of_the_setting_may_show_the_page_in_a_frame(
    chromium: Any, origin: str, name: str, request: pytest.FixtureRequest
) -> None:
    server: RunningServer = request.getfixturevalue(name)
    with contextlib.closing(chromium.new_page()) as page:
        page.goto(origin)
        frame = "url => document.body.append(Object.assign(document.createElement('iframe'), {src: url}))"
        page.evaluate(frame, f"{server.url}/?embed")
        frame = page.frame_locator("iframe")
        if name == "allowing":
            frame.locator("canvas, .alignment path").first.wait_for(state="attached")
            assert not frame.get_by_label("Text", exact=True).is_visible()  # an embedded view has no form
        else:
            page.wait_for_timeout(1000)
            assert frame.locator("#view").count() == 0
