"""Ollama's API through the unmodified `ollama` package, and the form of its JSON lines."""

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from ollama import Client, ResponseError, ShowResponse

from sightline import __version__
from sightline.base.bundle import GenerationDefaults
from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, Serve, Wire
from tests.support.dialogues import LINES
from tests.support.fake_runner import Faults, fake_manifest

GREETING = {"role": "user", "content": "a dog"}


def backend_of(tokenizer: TextTokenizer, **options: Any) -> FakeBackend:
    """Return a backend with a model that chats, `talker`, and a translator, `fake`."""
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 90, "max_target_tokens": 120}
    talker = fake_manifest("talker", decoder_start="source", **sizes).model_copy(
        update={"chat": LINES, "generation": GenerationDefaults(repetition_penalty=1.5)}
    )
    return FakeBackend(tokenizer, (fake_manifest("fake", **sizes), talker), **options)


@pytest.fixture(scope="module")
def wire(serve: Serve, tokenizer: TextTokenizer) -> Iterator[Wire]:
    with serve(backend_of(tokenizer)) as wire:
        yield wire


@pytest.fixture(scope="module")
def client(wire: Wire) -> Iterator[Client]:
    with client_of(wire) as client:
        yield client


def client_of(wire: Wire) -> Client:
    return Client(f"http://127.0.0.1:{wire.port}")


def own(wire: Wire, model: str, text: str, **parameters: Any) -> Any:
    """Return the output of the native endpoint."""
    return wire.result("/v1/generate", {"model": model, "inputs": text, "parameters": parameters})


def test_a_text_equals_the_text_of_generate(wire: Wire, client: Client) -> None:
    response = client.generate("fake", "a dog")
    expected = own(wire, "fake", "a dog", max_new_tokens=120)
    assert response.response == expected["outputs"][0]["text"]
    assert (response.prompt_eval_count, response.eval_count) == tuple(expected["usage"].values())
    assert (response.model, response.done, response.done_reason) == ("fake", True, "stop")
    assert response.total_duration is not None and response.prompt_eval_duration is not None
    assert 0 < response.prompt_eval_duration < response.total_duration
    assert response.created_at is not None
    assert abs((datetime.now(UTC) - datetime.fromisoformat(response.created_at)).total_seconds()) < 60


def test_options_are_the_parameters_of_generate(wire: Wire, client: Client) -> None:
    options = {"num_predict": 3, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 5, "num_ctx": 512}
    response = client.generate("fake", "a dog", options=options)
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    expected = own(wire, "fake", "a dog", max_new_tokens=3, **sampling)
    assert response.response == expected["outputs"][0]["text"]
    assert (response.done_reason, response.eval_count) == ("length", 3)
    stop = str(response.response)[-1]
    stopped = client.generate("fake", "a dog", options={"stop": [stop], "repeat_penalty": 1.2})
    expected = own(wire, "fake", "a dog", max_new_tokens=120, stop=[stop], repetition_penalty=1.2)
    assert stopped.response == expected["outputs"][0]["text"]


@pytest.mark.parametrize("limit", [-2, -1, 0, None])
def test_without_a_limit_as_many_tokens_are_generated_as_the_model_can(
    wire: Wire, client: Client, limit: int | None
) -> None:
    response = client.generate("fake", "a dog", options={"num_predict": limit})
    assert response.eval_count == own(wire, "fake", "a dog", max_new_tokens=120)["usage"]["output_tokens"]


def test_a_prompt_is_the_user_s_message_if_the_model_chats(wire: Wire, client: Client) -> None:
    response = client.generate("talker", "a dog", system="x")
    expected = own(wire, "talker", "S: x\nU: a dog\nB:", max_new_tokens=120)
    assert response.response == expected["outputs"][0]["text"]
    raw = client.generate("talker", "a dog", raw=True)
    assert raw.response == own(wire, "talker", "a dog", max_new_tokens=120)["outputs"][0]["text"]


def test_a_reply_equals_that_of_chat_completions(wire: Wire, client: Client) -> None:
    dialogue = [{"role": "system", "content": "x"}, GREETING, {"role": "assistant", "content": "Hund"}, GREETING]
    response = client.chat("talker", dialogue, options={"num_predict": 9})
    _, expected = wire.post("/v1/chat/completions", {"model": "talker", "messages": dialogue, "max_tokens": 9})
    assert response.message.role == "assistant"
    assert response.message.content == expected["choices"][0]["message"]["content"]
    assert client.chat("talker", [*dialogue, response.message, GREETING]).done  # a reply can be sent back


def test_the_parts_of_a_stream_form_the_whole_text(client: Client) -> None:
    whole, parts = client.generate("fake", "a dog"), list(client.generate("fake", "a dog", stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, "stop")
    reply, pieces = client.chat("talker", [GREETING]), list(client.chat("talker", [GREETING], stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == reply.message.content
    assert {piece.message.role for piece in pieces} == {"assistant"}


def test_a_request_streams_json_lines_by_default(wire: Wire) -> None:
    connection = wire.http()
    body = json.dumps({"model": "fake", "prompt": "a dog"})
    connection.request("POST", "/api/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.headers["Content-Type"] == "application/x-ndjson"
    lines = response.read().decode().splitlines()
    connection.close()
    assert len(lines) > 2
    assert json.loads(lines[0]).keys() == {"model", "created_at", "response", "done"}


def test_log_probabilities_are_those_of_generate(wire: Wire, client: Client) -> None:
    response = client.generate("fake", "a dog", logprobs=True, top_logprobs=2)
    tokens = own(wire, "fake", "a dog", max_new_tokens=120, top_logprobs=2)["outputs"][0]["tokens"]
    assert response.logprobs is not None
    assert [(one.token, one.logprob) for one in response.logprobs] == [(one["text"], one["logprob"]) for one in tokens]
    found = [[(top.token, top.logprob) for top in one.top_logprobs or ()] for one in response.logprobs]
    assert found == [[(top["text"], top["logprob"]) for top in one["alternatives"]] for one in tokens]
    streamed = [
        one for part in client.generate("fake", "a dog", stream=True, logprobs=True) for one in part.logprobs or ()
    ]
    assert [one.token for one in streamed] == [one["text"] for one in tokens]


def test_a_request_without_a_text_loads_the_model(wire: Wire, client: Client) -> None:
    response = client.generate("fake", keep_alive="5m")
    assert (response.response, response.done, response.done_reason) == ("", True, "load")
    assert wire.result("/api/generate", {"model": "fake", "prompt": None, "stream": False})["done_reason"] == "load"
    nothing: tuple[list[Any] | None, ...] = (None, [])
    for messages in nothing:
        reply = client.chat("talker", messages, keep_alive=0)
        assert (reply.message.role, reply.message.content, reply.done_reason) == ("assistant", "", "load")
    assert client.embed("fake", "").embeddings == client.embed("fake", []).embeddings == []
    assert client.embeddings("fake", "").embedding == []


@pytest.mark.parametrize(
    "empty", [{"images": []}, {"images": None}, {"images": None, "thinking": "", "tool_calls": []}]
)
def test_empty_fields_of_messages_change_nothing(wire: Wire, empty: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": "talker", "stream": False, "tools": None, "options": {"num_predict": 4}}
    body |= {"truncate": True, "shift": True}
    plain = wire.result("/api/chat", {**body, "messages": [GREETING]})
    assert wire.result("/api/chat", {**body, "messages": [GREETING | empty]})["message"] == plain["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_continuation_has_the_space_that_other_apis_return(wire: Wire, client: Client, is_streamed: bool) -> None:
    options: dict[str, Any] = {"options": {"num_predict": 5}, "stream": is_streamed}
    texts = []
    for text in ("gag", "dog"):  # a space belongs only before what follows the first one
        raw = client.generate("talker", text, raw=True, **options)
        texts.append("".join(part.response or "" for part in (raw if is_streamed else [raw])))
        body: dict[str, Any] = {"model": "talker", "prompt": text, "max_tokens": 5}
        assert texts[-1] == wire.result("/v1/completions", body)["choices"][0]["text"]
        dialogue = [GREETING, {"role": "assistant", "content": text}]
        reply = client.chat("talker", dialogue, **options)
        texts.append("".join(part.message.content or "" for part in (reply if is_streamed else [reply])))
        body = {"model": "talker", "messages": dialogue, "max_tokens": 5}
        assert texts[-1] == wire.result("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert [text.startswith(" ") for text in texts] == [True, False, False, True]


def test_vectors_have_length_1(wire: Wire, client: Client) -> None:
    response = client.embed("fake", ["a dog", "a"])
    _, expected = wire.post("/v1/encode", {"model": "fake", "inputs": ["a dog", "a"], "normalize": True})
    assert np.allclose(response.embeddings, expected["embeddings"], atol=1e-6)
    assert response.prompt_eval_count == expected["usage"]["input_tokens"]
    assert len(client.embed("fake", "a dog " * 500).embeddings) == 1  # longer than the model's limit
    for text in ("a dog", "a dog " * 500):
        expected = wire.result("/v1/encode", {"model": "fake", "inputs": text, "truncate": True})
        assert np.allclose(client.embeddings("fake", text).embedding, expected["embeddings"][0], atol=1e-6)


def test_the_models_in_memory_are_listed(serve: Serve, tokenizer: TextTokenizer) -> None:
    with serve(backend_of(tokenizer), lazy_models="talker") as wire, client_of(wire) as client:
        (loaded,) = client.ps().models
        assert (loaded.model, loaded.context_length, loaded.size_vram) == ("fake", 90, 0)
        assert loaded.expires_at is not None and loaded.expires_at.year == 9999
        client.chat("talker")
        assert [model.name for model in client.ps().models] == ["fake", "talker"]


def test_models_are_listed_and_described(wire: Wire, client: Client) -> None:
    models = {model.model: model for model in client.list().models}
    assert models.keys() == {"fake", "talker"}
    details = models["fake"].details
    assert details is not None and (details.format, details.quantization_level) == ("onnx", "float32")
    shown = client.show("talker:latest")
    sent = {"system": "", "template": "", "options": None, "verbose": False}  # by the client of Ollama itself
    for names in ({"name": "talker"}, {"model": "talker", "name": ""} | sent, {"model": "", "name": "talker"}):
        assert ShowResponse(**wire.result("/api/show", names)) == shown
    assert (shown.capabilities, shown.parameters) == (["completion", "embedding"], "repeat_penalty 1.5")
    assert shown.template == LINES.program
    assert shown.modelinfo is not None
    assert shown.modelinfo["fake.context_length"] == 90


def test_the_version_is_that_of_the_service(wire: Wire) -> None:
    status, body = wire.get("/api/version")
    assert (status, json.loads(body)) == (200, {"version": __version__})


def test_the_content_type_may_be_absent_but_not_another(wire: Wire) -> None:
    body = b'{"model": "fake", "prompt": "a dog", "stream": false}'
    curl = {"Content-Type": "application/x-www-form-urlencoded"}  # of its option -d
    for headers, status in (({}, 200), (curl, 200), ({"Content-Type": "text/plain"}, 415)):
        with contextlib.closing(wire.http()) as connection:
            connection.request("POST", "/api/generate", body, headers)
            assert connection.getresponse().status == status


def test_filters_imply_samples(client: Client) -> None:
    options = {"top_p": 0.8, "seed": 5, "num_predict": 8}
    drawn = client.generate("fake", "a dog", options=options).response
    assert drawn == client.generate("fake", "a dog", options={**options, "temperature": 1.0}).response


@pytest.mark.parametrize("model", ["fake", "fake:latest"])
def test_the_tag_latest_may_follow_a_name(client: Client, model: str) -> None:
    assert client.generate(model, "a dog").model == model


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_names_the_field_of_this_api(client: Client, is_streamed: bool) -> None:
    options: dict[str, Any] = {"stream": is_streamed, "options": {"num_predict": 999}}
    with pytest.raises(ResponseError, match=r"options\.num_predict must be at most 120 for fake") as caught:
        list(client.generate("fake", "a dog", **options))
    assert caught.value.status_code == 422


def test_a_broken_stream_ends_with_an_error(serve: Serve, tokenizer: TextTokenizer) -> None:
    with serve(backend_of(tokenizer, faults=Faults(step_calls=frozenset({2})))) as wire, client_of(wire) as client:
        parts = client.generate("fake", "a dog", stream=True)
        assert next(parts).response
        with pytest.raises(ResponseError):
            list(parts)


def test_an_unknown_path_has_the_form_of_this_api(wire: Wire) -> None:
    status, body = wire.get("/api/blobs")
    assert status == 404
    assert json.loads(body)["error"].startswith("There is no such route.")
