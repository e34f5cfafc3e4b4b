"""Calls to a running service."""

import json
from typing import Any
from urllib.request import Request, urlopen

from lab.bench.server import RunningServer


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    request = Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as response:
        return json.load(response)
