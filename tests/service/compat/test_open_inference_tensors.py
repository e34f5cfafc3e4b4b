"""Tensors of .../infer in JSON and as binary data, both ways, and invalid bodies."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from tests.service.conftest import Running, Start

pytestmark = pytest.mark.anyio

INFER = "/v2/models/fake/infer"
LENGTH = "inference-header-content-length"
ONE = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a dog"]}


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


async def send(running: Running, content: bytes, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """As a client that names no type."""
    return await running.client.post(INFER, content=content, headers=headers)


async def send_binary(
    running: Running, tail: bytes, shape: Any, size: Any = None, length: Any = None
) -> httpx.Response:
    """With texts behind the JSON; `size` and `length` are true where they are not given."""
    tensor = ONE | {"shape": shape, "parameters": {"binary_data_size": len(tail) if size is None else size}}
    del tensor["data"]
    header = json.dumps({"inputs": [tensor]}).encode()
    return await send(running, header + tail, {LENGTH: str(len(header) if length is None else length)})


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2], ["a dog", "Hünd"]),
        ([2, 1], ["a dog", "Hünd"]),
        ([2, 1], [["a dog"], ["Hünd"]]),
        ([2], [["a dog"], ["Hünd"]]),
    ],
)
async def test_flat_nested_and_binary_texts_are_equivalent(running: Running, shape: list[int], data: Any) -> None:
    response = await send(running, json.dumps({"inputs": [ONE | {"shape": shape, "data": data}]}).encode())
    binary = await send_binary(running, packed(b"a dog", "Hünd".encode()), shape)
    own = await running.post("/v1/generate", {"inputs": ["a dog", "Hünd"]})
    assert response.json()["outputs"][0]["data"] == [one["text"] for one in own.json()["outputs"]]
    assert binary.json() == response.json()


@pytest.mark.parametrize(
    "media_type", ["application/json", "application/octet-stream", "application/json; charset=utf-8"]
)
async def test_both_content_types_are_accepted(running: Running, media_type: str) -> None:
    response = await send(running, json.dumps({"inputs": [ONE]}).encode(), {"content-type": media_type})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert LENGTH not in response.headers


async def test_outputs_are_binary_on_request(running: Running) -> None:
    names = ["text_output", "num_tokens", "logprobs", "attention_cross", "source_tokens"]
    texts = {"inputs": [ONE | {"shape": [2], "data": ["a dog", "Hund"]}]}
    outputs: list[Any] = [{"name": name} for name in names]
    plain = (await send(running, json.dumps(texts | {"outputs": outputs}).encode())).json()["outputs"]
    outputs[1]["parameters"] = {"binary_data": False}
    outputs[2]["parameters"] = {"binary_data": True}
    body = texts | {"outputs": outputs, "parameters": {"binary_data_output": True}}
    response = await send(running, json.dumps(body).encode())
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers[LENGTH])
    found, tail = json.loads(response.content[:length])["outputs"], response.content[length:]
    assert [one["name"] for one in found] == names
    for mine, expected in zip(found, plain, strict=True):
        assert (mine["shape"], mine["datatype"]) == (expected["shape"], expected["datatype"])
        if mine["name"] == "num_tokens":
            assert mine == expected
            continue
        assert "data" not in mine
        size = mine["parameters"]["binary_data_size"]
        data, tail = tail[:size], tail[size:]
        if mine["datatype"] == "BYTES":
            assert data == packed(*(text.encode() for text in expected["data"]))
        else:
            assert np.frombuffer(data, "<f4").tolist() == np.array(expected["data"], "<f4").tolist()
    assert tail == b""


SIZE = "inputs[0].parameters.binary_data_size must be"
SHAPE = "inputs[0].shape must be the number of texts in the data"


@pytest.mark.parametrize(
    ("tail", "shape", "size", "message"),
    [
        (packed(b"a"), [1], 4, f"{SIZE} the number of bytes after the JSON (5), got 4."),
        (packed(b"a"), [1], 6, f"{SIZE} the number of bytes after the JSON (5), got 6."),
        *((packed(b"a"), [1], size, SIZE) for size in (-1, 2**70, True)),
        (packed(b"a"), [2], None, f"{SHAPE} (1), got 2."),
        (packed(b"a", b"b"), [1], None, f"{SHAPE} (at least 2), got 1."),
        (b"", [1], None, f"{SHAPE} (0), got 1."),
        (b"", [0], None, "text_input is an empty list."),
        (b"\0" * 4 * 40_000, [40_000], None, "inputs[0].shape[0] must be less than or equal to 2048, got 40000."),
        (b"\0" * 4 * 40_000, [32], None, f"{SHAPE} (at least 33), got 32."),
        (b"\xff\xff\xff\xffa", [1], None, "text_input: The last text ends after the data."),
        (b"\1\0\0\0", [1], None, "text_input: The last text ends after the data."),
        (b"\0\0", [1], None, "text_input: The last text ends after the data."),
        (packed(b"a", b"\xff"), [2], None, "text_input[1] must be UTF-8."),
        (packed(b"\xed\xa0\x80"), [1], None, "text_input[0] must be UTF-8."),
    ],
)
async def test_binary_data_that_contradicts_its_size_is_rejected(
    running: Running, tail: bytes, shape: Any, size: Any, message: str
) -> None:
    response = await send_binary(running, tail, shape, size)
    assert response.status_code == 422
    assert response.json()["error"].startswith(message)


@pytest.mark.parametrize(
    ("length", "status", "message"),
    [
        *(
            (length, 422, "Inference-Header-Content-Length must be")
            for length in (10**6, -1, "1e2", "", "x", "9" * 5000)
        ),
        (0, 400, "The body is empty; send a JSON object."),
        *((length, 400, "The body is not valid JSON in UTF-8: ") for length in (20, 108)),  # they cut the JSON
    ],
)
async def test_a_wrong_header_length_is_rejected(running: Running, length: Any, status: int, message: str) -> None:
    response = await send_binary(running, packed(b"a"), [1], length=length)
    assert response.status_code == status
    assert response.json()["error"].startswith(message)


async def test_binary_data_without_the_header_is_invalid_json(running: Running) -> None:
    header = json.dumps({"inputs": [ONE]}).encode()
    assert (await send(running, header + packed(b"a"))).status_code == 400


async def test_binary_data_counts_towards_the_size_of_the_body(start: Start) -> None:
    async with start(max_body_bytes=300) as running:
        assert (await send_binary(running, packed(b"a dog"), [1])).status_code == 200
        assert (await send_binary(running, packed(b"x" * 300), [1])).status_code == 413
