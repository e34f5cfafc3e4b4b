"""Common mistakes over HTTP, with the whole message of each: many clients show only the message."""

import asyncio
import threading
from typing import Any

import pytest

from tests.service.conftest import MakeBackend, Running, Start, until
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio

GENERATE = "/v1/generate"
INFER = "/v2/models/fake/infer"
ROUTES = "GET /docs lists all routes."


def tensor(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]} | changes]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        # Unknown fields
        (GENERATE, {"inputs": "x", "max_new_tokens": 3}, "max_new_tokens belongs in parameters."),
        (GENERATE, {"input": "x"}, "input is not a field of the body (did you mean inputs?)."),
        (
            GENERATE,
            {"inputs": "x", "secret": 1},
            "secret is not a field of the body; its fields are model, on_empty, inputs, parameters, stream.",
        ),
        (
            GENERATE,
            {"inputs": "x", "no name": 1},
            "The body has an unknown field; its fields are model, on_empty, inputs, parameters, stream.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"top_ps": 0.9}},
            "parameters.top_ps is not a field of parameters (did you mean parameters.top_p?).",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"return_attention": {"layer": [0]}}},
            "parameters.return_attention.layer is not a field of parameters.return_attention (did you mean "
            "parameters.return_attention.layers?).",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages[0].contents is not a field of messages[0] (did you mean messages[0].content?).",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "max_new_tokens": 3},
            "max_new_tokens is not a field of the body (did you mean max_tokens?).",
        ),
        # Values
        (GENERATE, {}, "inputs is required."),
        (GENERATE, {"inputs": 3}, "inputs must be a string or a list of strings."),
        (GENERATE, {"inputs": ["x", 3]}, "inputs[1] must be a string."),
        (GENERATE, {"inputs": ["x", " "]}, "inputs[1] is empty or contains only whitespace."),
        (GENERATE, {"inputs": []}, "inputs is an empty list."),
        (GENERATE, {"inputs": ["x"] * 33}, "inputs must have at most 32 entries (SIGHTLINE_MAX_INPUTS), got 33."),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"temperature": 0}},
            "parameters.temperature must be greater than 0, got 0.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"num_beams": 12}},
            "parameters.num_beams must be less than or equal to 8, got 12.",
        ),
        (GENERATE, {"inputs": "x", "parameters": {"top_k": 1.5}}, "parameters.top_k must be a valid integer, got 1.5."),
        (GENERATE, {"inputs": "x", "parameters": []}, "parameters must be an object."),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"max_new_tokens": 65}},
            "parameters.max_new_tokens must be at most 64 for fake, got 65.",
        ),
        (GENERATE, {"inputs": "x" * 70}, "inputs must have at most 64 tokens for this model, got 72."),
        (GENERATE, {"inputs": "x", "model": "other"}, "There is no model of this name; the models are fake."),
        ("/generate", {"inputs": "x", "parameters": {"best_of": 2}}, None),
        # JSON
        (GENERATE, b"", "The body is empty; send a JSON object."),
        (GENERATE, b" \n", "The body is empty; send a JSON object."),
        (
            GENERATE,
            b'{"inputs": "x",\n}',
            "The body is not valid JSON in UTF-8: trailing comma is not allowed, at line 1, column 15.",
        ),
        (GENERATE, b"[1]", "The body must be a JSON object."),
        # Routes
        ("/generate/", {}, f"There is no such route. Did you mean /generate? {ROUTES}"),
        ("/score", {}, f"There is no such route. Did you mean /v1/score? {ROUTES}"),
        ("/chat/completions", {}, f"There is no such route. Did you mean /v1/chat/completions? {ROUTES}"),
        ("/v1/v1/generate", {}, f"There is no such route. Did you mean /v1/generate? {ROUTES}"),
        ("/nothing-like-it", {}, f"There is no such route. {ROUTES}"),
        ("/" + "x" * 9000, {}, f"There is no such route. {ROUTES}"),
    ],
)
async def test_a_mistake_is_explained(running: Running, path: str, body: Any, message: str | None) -> None:
    headers = {"content-type": "application/json"}
    if isinstance(body, bytes):
        answer = await running.client.post(path, content=body, headers=headers)
    else:
        answer = await running.post(path, body)
    error = answer.json()["error"]
    if message is None:  # an API whose errors are one sentence
        assert error == "parameters.best_of must be 1 or null: other values are not supported."
    else:
        assert error["message"] == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [3]}, "inputs[0].shape must be the number of texts in the data (1), got 3."),
        ({"data": ["a", "b"]}, "inputs[0].shape must be the number of texts in the data (2), got 1."),
        ({"datatyp": "BYTES"}, "inputs[0].datatyp is not a field of inputs[0] (did you mean inputs[0].datatype?)."),
    ],
)
async def test_a_tensor_that_does_not_fit_is_explained(running: Running, changes: Any, message: str) -> None:
    answer = await running.post(INFER, tensor(**changes))
    assert (answer.status_code, answer.json()) == (422, {"error": message.replace(": It ", " ")})


@pytest.mark.parametrize(
    ("method", "path", "allowed", "message"),
    [
        ("GET", GENERATE, "POST", "/v1/generate accepts only POST."),
        ("PUT", "/v1/models/fake", "GET", "/v1/models/{model_id} accepts only GET."),
    ],
)
async def test_a_wrong_method_is_explained(
    running: Running, method: str, path: str, allowed: str, message: str
) -> None:
    answer = await running.client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["message"] == message


async def test_a_body_that_is_too_large_is_explained_with_the_setting(start: Start) -> None:
    async with start(max_body_bytes=100) as running:
        answer = await running.post(GENERATE, {"inputs": "x" * 100})
        message = "The body must be at most 100 bytes, got 113 (SIGHTLINE_MAX_BODY_BYTES)."
        assert answer.json()["error"]["message"] == message


async def test_a_full_queue_is_explained_with_the_setting(start: Start, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), max_rows=1, max_waiting_sequences=2) as running:
        calls = [asyncio.ensure_future(running.post(GENERATE, {"inputs": "x"})) for _ in range(3)]
        await until(lambda: running.backend.num_busy == 3)
        answer = await running.post(GENERATE, {"inputs": "x"})
        hang.set()
        await asyncio.gather(*calls)
    assert answer.json()["error"]["message"] == (
        "The queue is full: 3 of 3 sequences are running or waiting (SIGHTLINE_MAX_WAITING_SEQUENCES), and a call of 1 "
        "needs space for 1. Retry later."
    )
