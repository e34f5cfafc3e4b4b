import gzip
import http.client
import json
from contextlib import closing
from typing import Any

import pytest

from sightline.service.http.compression import MAX_INLINE_BYTES, MIN_BYTES, accepts_gzip, compress
from tests.service.conftest import Serve, Wire

LONG = {"inputs": ["a dog " * 8] * 8}


def post(wire: Wire, body: Any, encoding: str | None) -> tuple[http.client.HTTPMessage, bytes]:
    """Return the headers and the body of a response as they were sent."""
    headers = {"Content-Type": "application/json"} | ({} if encoding is None else {"Accept-Encoding": encoding})
    with closing(http.client.HTTPConnection("127.0.0.1", wire.port)) as connection:
        connection.putrequest("POST", "/v1/tokenize", skip_accept_encoding=True)
        data = json.dumps(body).encode()
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            connection.putheader(name, value)
        connection.endheaders(data)
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        assert int(response.headers["Content-Length"]) == len(content)
        return response.headers, content


@pytest.mark.parametrize("encoding", ["gzip", "br, GZIP", "gzip;q=0.5, identity", "deflate,gzip ; q=1.0"])
def test_a_response_is_compressed_for_a_client_that_accepts_it(serve: Serve, encoding: str) -> None:
    with serve() as wire:
        plain_headers, plain = post(wire, LONG, None)
        headers, compressed = post(wire, LONG, encoding)
    assert len(plain) >= MIN_BYTES and len(compressed) < len(plain) / 2
    assert gzip.decompress(compressed) == plain
    assert headers["Content-Encoding"] == "gzip" and "Content-Encoding" not in plain_headers
    assert headers["Vary"] == plain_headers["Vary"] == "Accept-Encoding"


@pytest.mark.parametrize("encoding", ["identity", "br", "gzip;q=0", "gzip;q=0.000, br", "xgzip", ""])
def test_a_response_is_plain_for_other_clients(serve: Serve, encoding: str) -> None:
    with serve() as wire:
        headers, content = post(wire, LONG, encoding)
    assert "Content-Encoding" not in headers
    assert json.loads(content)


def test_a_small_response_is_never_compressed(serve: Serve) -> None:
    with serve() as wire:
        headers, content = post(wire, {"inputs": "a"}, "gzip")
    assert len(content) < MIN_BYTES
    assert "Content-Encoding" not in headers and "Vary" not in headers


@pytest.mark.anyio
@pytest.mark.parametrize("size", [MIN_BYTES, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1, 1_000_000])
async def test_any_size_is_compressed_whole(size: int) -> None:
    body = bytes(number % 251 for number in range(size))
    assert gzip.decompress(await compress(body)) == body


def test_absent_header_accepts_nothing() -> None:
    assert not accepts_gzip({})
