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


async def test_the_content_type_header_is_optional(running: Running) -> None:
    for path in (GENERATE, STREAM):
        assert (await running.client.post(path, content=b'{"text_input": "a dog"}')).status_code == 200


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
