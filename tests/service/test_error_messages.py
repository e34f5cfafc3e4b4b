"""Common mistakes over HTTP, with the whole message of each: many clients show only the message."""

import asyncio
import threading
from typing import Any

import pytest

from tests.service.conftest import MakeBackend, Running, Start, until
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio

GENERATE = "/v1/generate"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
INFER = "/v2/models/fake/infer"
HELLO = {"role": "user", "content": "x"}
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
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role must be 'system', 'developer', 'user' or 'assistant'; there are no tools, so send the "
            "result of a tool as a message of the user.",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "max_tokens": 70000},
            "max_tokens must be less than or equal to 65536, got 70000; GET /v1/models has the limits of each model.",
        ),
        (GENERATE, {"inputs": ["x", 3]}, "inputs[1] must be a string."),
        (GENERATE, {"inputs": ["x", " "]}, "inputs[1] is empty or contains only whitespace."),
        (GENERATE, {"inputs": []}, "inputs is an empty list."),
        (
            GENERATE,
            {"inputs": ["x"] * 2049},
            "inputs must have at most 2048 strings (or fewer, see SIGHTLINE_MAX_INPUTS), got 2049.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"temperature": 0}},
            "parameters.temperature must be greater than 0, got 0; for the most probable tokens, "
            "leave it out or set do_sample to false.",
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
        (
            GENERATE,
            {"inputs": "x" * 70},
            "inputs must have at most 64 tokens for this model, got 72; shorten or split it.",
        ),
        (GENERATE, {"inputs": "x", "model": "other"}, "There is no model of this name; the models are fake."),
        ("/generate", {"inputs": "x", "parameters": {"best_of": 2}}, None),
        # Types
        (
            GENERATE,
            {"inputs": "x", "parameters": {"max_new_tokens": "20"}},
            "parameters.max_new_tokens must be a valid integer, got a string.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"do_sample": "true"}},
            "parameters.do_sample must be a valid boolean, got a string.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"suppress_tokens": 3}},
            "parameters.suppress_tokens must be a list, got 3.",
        ),
        (GENERATE, {"inputs": "x", "model": None, "stream": None}, "stream must be a valid boolean, got null."),
        (GENERATE, {"inputs": "x", "model": "y" * 200}, "model must have at most 128 characters, got 200."),
        (GENERATE, {"inputs": "x", "on_empty": "skip"}, "on_empty must be 'error' or 'pass'."),
        # Limits and combinations
        (
            GENERATE,
            {"inputs": "x", "parameters": {"max_new_tokens": 0}},
            "parameters.max_new_tokens must be greater than or equal to 1, got 0.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"seed": 2**60}},
            "parameters.seed must be less than or equal to 9007199254740991, got 1152921504606846976.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"stop": ["a"] * 5}},
            "parameters.stop must have at most 4 strings, got 5.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"temperature": 0.5}},
            "parameters.temperature has no effect without parameters.do_sample: true.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"num_beams": 2, "do_sample": True}},
            "parameters.num_beams above 1 cannot be combined with parameters.do_sample: true.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"num_return_sequences": 3}},
            "parameters.num_return_sequences must be at most parameters.num_beams (1) without "
            "parameters.do_sample: true, got 3.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"min_new_tokens": 9, "max_new_tokens": 3}},
            "parameters.min_new_tokens must be at most parameters.max_new_tokens (3), got 9.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"num_beams": 2}, "stream": True},
            "Beam search cannot be streamed: set parameters.num_beams to 1, or do not stream.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"target_prefix": ["a", "b"]}},
            "parameters.target_prefix must be one string, or a list with a string for each input (1), got 2.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"return_attention": {"layers": [7]}}},
            "parameters.return_attention.layers[0] must be from -2 to 1 for encoder attention, got 7.",
        ),
        (
            "/v1/attention",
            {"inputs": "x", "kinds": ["self"]},
            "kinds[0] must be 'encoder', 'encoder_slots', 'cross' or 'decoder'.",
        ),
        (
            "/v1/score",
            {"inputs": ["x", "y"], "targets": ["a"]},
            "inputs and targets must be both one string, or both lists of the same length, got 2 and 1.",
        ),
        ("/v1/encode", {"inputs": "x", "pooling": "cls"}, "pooling must be 'mean', 'first', 'last', 'max' or 'none'."),
        ("/v1/detokenize", {"ids": [[99999]]}, "ids[0][0] must be at most 264 for this model, got 99999."),
        (
            "/v1/similar",
            {"token": "two words"},
            "token is 10 tokens of this model, and must be one. POST /v1/tokenize shows the tokens; try a more "
            "frequent word or different capitalization.",
        ),
        # Models without the task or the language
        (
            "/v1/classify",
            {"inputs": "x"},
            "No model of this service can do the task classify; GET /v1/models lists the tasks of each model.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"source_language": "en"}},
            "parameters.source_language: No model of this service translates; GET /v1/models lists the tasks of each "
            "model.",
        ),
        (
            GENERATE,
            {"inputs": "x", "parameters": {"split_sentences": True}},
            "parameters.split_sentences is supported only by models that translate, and fake does not.",
        ),
        (
            CHAT,
            {"messages": [HELLO]},
            "No model of this service can do the task chat; GET /v1/models lists the tasks of each model.",
        ),
        # Habits from other services
        (CHAT, {"model": "gpt-4o", "messages": [HELLO]}, "There is no model of this name; the models are fake."),
        (CHAT, {"messages": []}, "messages must have at least 1 item, got 0."),
        (CHAT, {"messages": "x"}, "messages must be a list, got a string."),
        (
            CHAT,
            {"messages": [{"role": "system", "content": "y"}]},
            "messages: At least one message must be the user's: the model replies to it.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type must be text: other parts are not supported.",
        ),
        (
            CHAT,
            {"messages": [HELLO], "response_format": {"type": "json_object"}},
            'response_format must be {"type": "text"} or null: other values are not supported.',
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "temperature": 0, "n": 2},
            "n above 1 needs a temperature above 0, or num_beams.",
        ),
        (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs must be a valid integer, got true."),
        (
            COMPLETIONS,
            {"prompt": "x", "best_of": 3},
            "best_of must equal n (1), got 3; use num_beams for beam search.",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "echo": True},
            "echo is supported only by decoder-only models, and fake is an encoder-decoder; leave it out.",
        ),
        (
            "/v1/embeddings",
            {"input": "x", "dimensions": 3},
            "dimensions must be 4, the dimensions of the model's vectors, got 3.",
        ),
        # JSON
        (
            GENERATE,
            b"{'inputs': 'x'}",
            "The body is not valid JSON in UTF-8: unexpected character, expected a string key, at line 1, column 2.",
        ),
        (
            GENERATE,
            b'{"inputs": "x"',
            "The body is not valid JSON in UTF-8: unexpected end of data, at line 1, column 15.",
        ),
        (
            GENERATE,
            b'{\n"inputs": "na\xefve"}',
            "The body is not valid JSON in UTF-8: invalid UTF-8, at line 2, column 14.",
        ),
        (
            GENERATE,
            b"inputs=x",
            "The body is not valid JSON in UTF-8: unexpected character, expected a JSON value, at line 1, column 1.",
        ),
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
        ("/V1/generate", {}, f"There is no such route. Did you mean /v1/generate? {ROUTES}"),
        ("/v1/translate", {}, f"There is no such route. Did you mean /translate? {ROUTES}"),
        ("/v1/v1/generate", {}, f"There is no such route. Did you mean /v1/generate? {ROUTES}"),
        ("/nothing-like-it", {}, f"There is no such route. {ROUTES}"),
        ("/" + "x" * 9000, {}, f"There is no such route. {ROUTES}"),
    ],
)
async def test_a_mistake_is_explained(running: Running, path: str, body: Any, message: str | None) -> None:
    headers = {"content-type": "application/json"}
    if isinstance(body, bytes):
        response = await running.client.post(path, content=body, headers=headers)
    else:
        response = await running.post(path, body)
    error = response.json()["error"]
    if message is None:  # an API whose errors are one sentence
        assert error == "parameters.best_of must be 1 or null: other values are not supported."
    else:
        assert error["message"] == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [3]}, "inputs[0].shape must be the number of texts in the data (1), got 3."),
        ({"data": ["a", "b"]}, "inputs[0].shape must be the number of texts in the data (2), got 1."),
        ({"shape": [1, 2]}, "inputs[0].shape must be [texts] or [texts, 1], because each text is a row."),
        ({"datatype": "FP32"}, "inputs[0].datatype must be 'BYTES'."),
        (
            {"data": None},
            "inputs[0].data: Give the texts either here, or as bytes after the JSON with their length in "
            "parameters.binary_data_size.",
        ),
        ({"datatyp": "BYTES"}, "inputs[0].datatyp is not a field of inputs[0] (did you mean inputs[0].datatype?)."),
    ],
)
async def test_a_tensor_that_does_not_fit_is_explained(running: Running, changes: Any, message: str) -> None:
    response = await running.post(INFER, tensor(**changes))
    assert (response.status_code, response.json()) == (422, {"error": message.replace(": It ", " ")})


@pytest.mark.parametrize(
    ("method", "path", "allowed", "message"),
    [
        ("GET", GENERATE, "POST", "/v1/generate accepts only POST."),
        ("PUT", "/v1/models/fake", "GET", "/v1/models/{model_id} accepts only GET."),
        ("POST", "/v1/models", "GET", "/v1/models accepts only GET."),
    ],
)
async def test_a_wrong_method_is_explained(
    running: Running, method: str, path: str, allowed: str, message: str
) -> None:
    response = await running.client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.json()["error"]["message"] == message


async def test_a_body_that_is_too_large_is_explained_with_the_setting(start: Start) -> None:
    async with start(max_body_bytes=100) as running:
        response = await running.post(GENERATE, {"inputs": "x" * 100})
        message = "The body must be at most 100 bytes, got 113 (SIGHTLINE_MAX_BODY_BYTES)."
        assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/translate",
            {"q": "x", "source": "en", "target": "de"},
            "source: No model of this service translates; GET /v1/models lists the tasks of each model.",
        ),
        (
            "/translate",
            {"q": "x", "source": "en", "target": "de", "format": "html"},
            'format must be "text" or null: other values are not supported.',
        ),
        ("/translate", {"text": "x", "source": "en", "target": "de"}, None),
        ("/generate?model=nothing", {"inputs": "x"}, "There is no model of this name; the models are fake."),
        (
            "/predict",
            {"inputs": "x"},
            "No model of this service can do the task classify; GET /v1/models lists the tasks of each model.",
        ),
        (
            INFER,
            {**tensor(), "parameters": {"max_tokens": 3}},
            "parameters.max_tokens is not a field of parameters (did you mean parameters.max_new_tokens?).",
        ),
        (INFER, {"inputs": []}, "inputs must have at least 1 item, got 0."),
    ],
)
async def test_a_mistake_is_explained_by_apis_whose_errors_are_one_sentence(
    running: Running, path: str, body: Any, message: str | None
) -> None:
    expected = message or (
        "text is not a field of the body; its fields are on_empty, q, source, target, format, alternatives, api_key."
    )
    assert (await running.post(path, body)).json()["error"] == expected


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content-type": "text/plain"}, 415, "The Content-Type must be application/json, in UTF-8."),
        (
            {"content-type": "application/x-www-form-urlencoded"},  # that of curl -d
            415,
            "The Content-Type must be application/json, in UTF-8.",
        ),
        (
            {"content-encoding": "br"},
            415,
            "Content-Encoding must be gzip, deflate or identity, and only one of them.",
        ),
        (
            {"content-encoding": "gzip"},
            400,
            "The body is not valid gzip; compress it, or send no Content-Encoding.",
        ),
        (
            {"x-request-timeout-ms": "1.5"},
            422,
            "X-Request-Timeout-Ms must be a whole number of milliseconds above 0.",
        ),
    ],
)
async def test_a_wrong_header_is_explained(
    running: Running, headers: dict[str, str], status: int, message: str
) -> None:
    response = await running.post(GENERATE, {"inputs": "x"}, **headers)
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)


async def test_a_full_queue_is_explained_with_the_setting(start: Start, make_backend: MakeBackend) -> None:
    hang = threading.Event()
    async with start(make_backend(faults=Faults(hang=hang)), max_rows=1, max_waiting_sequences=2) as running:
        calls = [asyncio.ensure_future(running.post(GENERATE, {"inputs": "x"})) for _ in range(3)]
        await until(lambda: running.backend.num_busy == 3)
        response = await running.post(GENERATE, {"inputs": "x"})
        hang.set()
        await asyncio.gather(*calls)
    assert response.json()["error"]["message"] == (
        "The queue is full: 3 of 3 sequences are running or waiting (SIGHTLINE_MAX_WAITING_SEQUENCES), and a call of 1 "
        "needs space for 1. Retry later."
    )
