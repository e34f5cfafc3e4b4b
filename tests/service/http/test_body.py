"""Compressed bodies: limits apply to the decompressed size."""

import gzip
import tracemalloc
import zlib
from typing import Any

import orjson
import pytest

from sightline.service.api_errors import ApiError
from sightline.service.http.http_call import decompress
from tests.service.conftest import Start

pytestmark = pytest.mark.anyio

BODY = orjson.dumps({"inputs": "a dog"})


async def test_compressed_bodies_are_read_as_plain_ones(start: Start) -> None:
    async with start() as running:
        plain = await running.post("/v1/generate", {"inputs": "a dog"})
        for coding, content in (
            ("gzip", gzip.compress(BODY)),
            ("GZIP", gzip.compress(BODY)),
            ("deflate", zlib.compress(BODY)),
            ("identity", BODY),
            ("", BODY),
        ):
            headers = {"content-type": "application/json", "content-encoding": coding}
            response = await running.client.post("/v1/generate", content=content, headers=headers)
            assert response.status_code == 200, response.text
            assert response.json()["outputs"] == plain.json()["outputs"]


@pytest.mark.parametrize(
    ("coding", "content", "code", "message"),
    [
        ("br", BODY, "unsupported_media_type", "Content-Encoding must be gzip, deflate or identity"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), "unsupported_media_type", "and only one of them"),
        ("gzip", BODY, "malformed_json", "The body is not valid gzip"),
        ("gzip", zlib.compress(BODY), "malformed_json", "The body is not valid gzip"),
        ("gzip", gzip.compress(BODY)[:-1], "malformed_json", "one complete gzip stream"),
        ("gzip", gzip.compress(BODY)[:-8] + bytes(8), "malformed_json", "The body is not valid gzip"),
        ("gzip", gzip.compress(BODY) + b"x", "malformed_json", "one complete gzip stream"),
        ("gzip", b"", "malformed_json", "one complete gzip stream"),
        ("deflate", gzip.compress(BODY), "malformed_json", "The body is not valid deflate"),
    ],
    ids=["br", "twice", "plain", "zlib", "cut", "checksum", "more", "empty", "deflate"],
)
async def test_invalid_compressed_data_is_rejected(
    start: Start, coding: str, content: bytes, code: str, message: str
) -> None:
    async with start() as running:
        headers = {"content-type": "application/json", "content-encoding": coding}
        response = await running.client.post("/v1/generate", content=content, headers=headers)
        error = response.json()["error"]
        assert error["code"] == code
        assert message in error["message"]


async def test_the_limit_applies_to_the_decompressed_size_of_a_body(start: Start) -> None:
    async with start(max_body_bytes=4096) as running:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        for size, status in ((4096, 200), (4097, 413)):
            content = gzip.compress(BODY.ljust(size))
            response = await running.client.post("/v1/generate", content=content, headers=headers)
            assert response.status_code == status
        assert response.json()["error"]["code"] == "body_too_large"
        assert "at most 4096 bytes after decompression" in response.json()["error"]["message"]


def test_a_bomb_is_never_decompressed_beyond_the_limit() -> None:
    bomb = gzip.compress(bytes(300_000_000), compresslevel=1)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="body_too_large"):
            decompress(bomb, "gzip", 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000 + len(bomb)
    finally:
        tracemalloc.stop()


async def test_admission_counts_the_decompressed_size_of_a_body(start: Start) -> None:
    async with start(max_body_bytes=5000, max_waiting_bytes=5000) as running:
        admission = running.app.state.service.models["fake"].admission
        reserved: list[int] = []
        reserve = admission.reserve

        def watched(sequences: int, num_bytes: int, *estimates: float) -> Any:
            reserved.append(num_bytes)
            return reserve(sequences, num_bytes, *estimates)

        admission.reserve = watched
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        content = gzip.compress(BODY.ljust(3000))
        assert (await running.client.post("/v1/generate", content=content, headers=headers)).status_code == 200
        assert reserved == [3000]
