"""POST .../generate and .../generate_stream of the Open Inference Protocol."""

from typing import Any

import pytest

from tests.service.conftest import FakeBackend, MakeBackend, Running, Start, generate
from tests.support.fake_runner import Faults

pytestmark = pytest.mark.anyio

GENERATE, STREAM = "/v2/models/fake/generate", "/v2/models/fake/generate_stream"


@pytest.mark.parametrize(
    "parameters",
    [
        *({}, {"max_new_tokens": 3}, {"do_sample": True, "seed": 4, "stop": "x"}, {"num_beams": 3}),
        {"logit_bias": {"7": 4, "9": -1.5}, "presence_penalty": 1, "frequency_penalty": -0.5},
    ],
)
async def test_the_text_equals_that_of_generate(running: Running, parameters: dict[str, Any]) -> None:
    (own,) = (await generate(running, "a dog", **parameters))["outputs"]
    for path in (GENERATE, "/v2/models/fake/versions/1/generate"):
        body = {"id": "q7", "text_input": "a dog", "parameters": {**parameters, "stream": False}}
        response = await running.post(path, body)
        assert response.json() == {
            "id": "q7",
            "model_name": "fake",
            "model_version": "1",
            "text_output": own["text"],
            "finish_reason": own["finish_reason"],
        }
    assert "id" not in (await running.post(GENERATE, {"text_input": "a dog"})).json()


async def test_the_pieces_of_a_stream_form_the_whole_text(running: Running) -> None:
    (own,) = (await generate(running, "a dog", max_new_tokens=9))["outputs"]
    for path in (STREAM, "/v2/models/fake/versions/1/generate_stream"):
        body = {"id": "q7", "text_input": "a dog", "parameters": {"max_new_tokens": 9, "stream": True}}
        *pieces, end = await running.events(path, body, has_end_mark=False)
        assert len(pieces) == len(own["tokens"])
        assert "".join(piece["text_output"] for piece in pieces) == own["text"]
        assert all("finish_reason" not in piece for piece in pieces)
        assert (end["text_output"], end["finish_reason"]) == ("", own["finish_reason"])
        assert all(
            (one["id"], one["model_name"], one["model_version"]) == ("q7", "fake", "1") for one in (*pieces, end)
        )


async def test_bodies_of_litellm_are_accepted(running: Running) -> None:
    """LiteLLM sends `stream` beside the parameters, and always `max_tokens`."""
    (own,) = (await generate(running, "a dog", max_new_tokens=9))["outputs"]
    for path, is_streamed in ((GENERATE, False), (STREAM, True)):
        body = {"text_input": "a dog", "parameters": {"max_tokens": 9}, "stream": is_streamed}
        if is_streamed:
            parts = await running.events(path, body, has_end_mark=False)
        else:
            parts = [await running.result(path, body)]
        assert "".join(part["text_output"] for part in parts) == own["text"]
        wrong = (await running.post(path, {**body, "stream": not is_streamed})).json()["error"]
        assert wrong == "stream must be false for generate and true for generate_stream."


async def test_the_content_type_header_is_optional(running: Running) -> None:
    for path in (GENERATE, STREAM):
        assert (await running.client.post(path, content=b'{"text_input": "a dog"}')).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (GENERATE, {}, "text_input is required."),
        (GENERATE, {"text_input": " "}, "text_input is empty or contains only whitespace."),
        (GENERATE, {"text_input": ["a"]}, "text_input must be a string."),
        (
            GENERATE,
            {"text_input": "x" * 70},
            "text_input must have at most 64 tokens for this model, got 72; shorten or split it.",
        ),
        (
            GENERATE,
            {"text_input": "a", "max_tokens": 3},
            "max_tokens belongs in parameters.",
        ),
        (GENERATE, {"text_input": "a", "id": 3}, "id must be a valid string, got 3."),
    ],
)
async def test_the_body_is_validated(running: Running, path: str, body: dict[str, Any], message: str) -> None:
    response = await running.post(path, body)
    assert response.status_code == 422
    assert response.json()["error"].startswith(message)


@pytest.mark.parametrize(
    ("path", "parameters", "message"),
    [
        (GENERATE, {"max_tokens": 65}, "max_tokens must be at most 64 for fake, got 65."),
        (
            GENERATE,
            {"max_tokens": 5, "max_new_tokens": 6},
            "max_tokens is the same parameter as max_new_tokens; send only one of them.",
        ),
        (GENERATE, {"stream": True}, "stream must be false for generate and true for generate_stream."),
        (STREAM, {"stream": False}, "stream must be false for generate and true for generate_stream."),
        (
            STREAM,
            {"num_beams": 2},
            "Beam search cannot be streamed: set parameters.num_beams to 1, or do not stream.",
        ),
        (
            GENERATE,
            {"num_beams": 2, "num_return_sequences": 2},
            "num_return_sequences must be 1: this endpoint returns one text. Use infer for several.",
        ),
        (GENERATE, {"top_logprobs": 3}, "top_logprobs is not a field of parameters; its fields are max_new_tokens, "),
        (GENERATE, {"timeout": 3}, "timeout is not supported; leave it out."),
        (
            GENERATE,
            {"temperature": 0},
            "temperature must be greater than 0, got 0; for the most probable tokens, "
            "leave it out or set do_sample to false.",
        ),
        (
            GENERATE,
            {"max_new_tokens": 99},
            "max_new_tokens must be at most 64 for fake, got 99.",
        ),
    ],
)
async def test_an_error_names_the_parameter(
    running: Running, path: str, parameters: dict[str, Any], message: str
) -> None:
    response = await running.post(path, {"text_input": "a dog", "parameters": parameters})
    assert response.status_code == 422
    assert response.json()["error"].startswith(message if message.startswith("Beam ") else f"parameters.{message}")


async def test_another_model_version_or_type_is_rejected(running: Running) -> None:
    body = {"text_input": "a dog"}
    for path in ("/v2/models/nobody/generate", "/v2/models/fake/versions/2/generate_stream"):
        assert (await running.post(path, body)).status_code == 404
    assert (await running.post(GENERATE, body, **{"content-type": "text/plain"})).status_code == 415
    assert (await running.post(GENERATE, body, **{"content-type": "application/octet-stream"})).status_code == 415


async def test_an_error_in_a_stream_is_an_event_with_the_protocols_shape(
    start: Start, make_backend: MakeBackend
) -> None:
    backend: FakeBackend = make_backend(faults=Faults(step_calls=frozenset({4})))
    async with start(backend) as running:
        body = {"text_input": "x", "parameters": {"min_new_tokens": 20}}
        *pieces, error = await running.events(STREAM, body, has_end_mark=False)
        assert len(pieces) >= 1 and all("text_output" in piece for piece in pieces)
        assert list(error) == ["error"] and error["error"].startswith("Internal error; the log has the details")
