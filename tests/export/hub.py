"""A small hub on the loopback with the routes that huggingface_hub uses to download a model."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Content and behaviour of the hub, and the requests that it received."""

    files: dict[str, bytes]
    name: str = "owner/tiny"
    url: str = ""
    token: str | None = None  # required if it is set
    gated: bool = False
    status: int | None = None  # of every response
    cut: dict[str, int] = field(default_factory=dict)  # bytes after which a transfer breaks off once, by file
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond(has_body=False)

    def do_GET(self) -> None:
        self._respond(has_body=True)

    def _respond(self, has_body: bool) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.status is not None:
            return self._send(hub.status, b"", has_body)
        if path.startswith("/cdn/"):
            return self._send_file(path.removeprefix("/cdn/"), has_body)
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._error(401, "RepoNotFound", has_body)
        if hub.gated and "/resolve/" in path:
            return self._error(403, "GatedRepo", has_body)
        if not path.startswith((f"/api/models/{hub.name}", f"/{hub.name}/")):
            return self._error(404, "RepoNotFound", has_body)
        if "/revision/" in path and path.rpartition("/")[2] not in ("main", "v1", COMMIT):
            return self._error(404, "RevisionNotFound", has_body)
        if "/tree/" in path:
            return self._send_json([self._entry(name) for name in hub.files], has_body)
        if path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in hub.files]
            card = {"license": "mit"}
            document = {"_id": "1", "id": hub.name, "sha": COMMIT, "siblings": siblings, "cardData": card, "tags": []}
            return self._send_json(document, has_body)
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if name not in hub.files:
            return self._error(404, "EntryNotFound", has_body)
        if name.endswith((".safetensors", ".bin")):  # large files are on another server
            digest = hashlib.sha256(hub.files[name]).hexdigest()
            headers = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(hub.files[name]))}
            headers |= {"X-Repo-Commit": COMMIT, "Location": f"{hub.url}/cdn/{name}"}
            return self._send(302, b"", has_body, headers)
        return self._send_file(name, has_body)

    def _entry(self, name: str) -> dict[str, object]:
        data = self.hub.files[name]
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _git_id(data)}
        if name.endswith((".safetensors", ".bin")):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
        return entry

    def _send_file(self, name: str, has_body: bool) -> None:
        data = self.hub.files[name]
        headers = {"ETag": f'"{_git_id(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, requested = 200, self.headers.get("Range")
        if requested:
            start = int(requested.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[start:]
        self._send(status, data, has_body, headers, self.hub.cut.pop(name, None) if has_body else None)

    def _send_json(self, document: object, has_body: bool) -> None:
        self._send(200, json.dumps(document).encode(), has_body, {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, has_body: bool) -> None:
        self._send(status, b"{}", has_body, {"X-Error-Code": code})

    def _send(
        self, status: int, data: bytes, has_body: bool, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """Serve the files of a folder as the repository owner/tiny."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
    hub = Hub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
