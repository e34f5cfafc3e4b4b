"""Constrained output in all APIs, over the fake model, whose logits are pseudo-random."""

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from tests.service.conftest import Running, generate

pytestmark = pytest.mark.anyio
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}
CLOSED = SCHEMA | {"additionalProperties": False}  # which texts have to match, too
MESSAGES = [{"role": "user", "content": "a dog"}]
NAMED = {"name": "x", "schema": SCHEMA, "strict": True}


async def lines_of(running: Running, path: str, body: Any) -> list[Any]:
    return [json.loads(line) for line in (await running.post(path, body)).text.splitlines()]


@pytest.mark.parametrize("response_format", [{"type": "json_object"}, {"type": "json_schema", "json_schema": NAMED}])
async def test_openai_and_ollama_constrain_a_reply(chat: Running, response_format: dict[str, Any]) -> None:
    schema = CLOSED if "json_schema" in response_format else {"type": "object"}
    body: dict[str, Any] = {"messages": MESSAGES, "response_format": response_format}
    whole = (await chat.result("/v1/chat/completions", body))["choices"][0]
    assert jsonschema_rs.is_valid(schema, json.loads(whole["message"]["content"]))
    events = await chat.events("/v1/chat/completions", body | {"stream": True})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole["message"]["content"]
    options = {"model": "fake", "messages": MESSAGES, "format": SCHEMA if schema is CLOSED else "json"}
    assert (await chat.result("/api/chat", options | {"stream": False}))["message"]["content"] == whole["message"][
        "content"
    ]
    streamed = await lines_of(chat, "/api/chat", options)
    assert "".join(line["message"]["content"] for line in streamed) == whole["message"]["content"]


async def test_texts_are_constrained_in_all_apis(running: Running) -> None:
    """They equal that of the native API, whatever the form of the request."""
    (output,) = (await generate(running, "a dog", constraint={"json_schema": SCHEMA}))["outputs"]
    assert jsonschema_rs.is_valid(CLOSED, json.loads(output["text"])) and output["finish_reason"] == "eos"
    completion = {"prompt": "a dog", "response_format": {"type": "json_schema", "json_schema": NAMED}}
    assert (await running.result("/v1/completions", completion))["choices"][0]["text"] == output["text"]
    for grammar in ({"type": "json", "value": SCHEMA}, {"type": "json_schema", "value": NAMED}):
        body: dict[str, Any] = {"inputs": "a dog", "parameters": {"grammar": grammar}}
        assert (await running.result("/generate", body))["generated_text"] == output["text"]
    ollama: dict[str, Any] = {"model": "fake", "prompt": "a dog", "format": SCHEMA, "stream": False}
    assert (await running.result("/api/generate", ollama))["response"] == output["text"]
    tgi = {"inputs": "a dog", "parameters": {"grammar": {"type": "regex", "value": "[ab]{3}"}}}
    assert re.fullmatch("[ab]{3}", (await running.result("/generate", tgi))["generated_text"])
    for free in ({"response_format": {"type": "text"}}, {"response_format": None}):
        response = await running.result("/v1/completions", {"prompt": "a dog", "max_tokens": 9, **free})
        assert (
            response["choices"][0]["text"] == (await generate(running, "a dog", max_new_tokens=9))["outputs"][0]["text"]
        )


METHODS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 3},
    {"do_sample": True, "seed": 5, "num_return_sequences": 4, "temperature": 2.0},
    {"repetition_penalty": 1.5, "top_logprobs": 2},
    {"target_prefix": '{"a": 4'},
    {"target_prefix": '{"a": 4', "num_beams": 3, "num_return_sequences": 3},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
async def test_a_constraint_holds_with_every_method(running: Running, causal: Running, method: dict[str, Any]) -> None:
    prefix = method.get("target_prefix", "")
    for service in (running, causal):
        outputs = (await generate(service, "a dog", constraint={"json_schema": SCHEMA}, **method))["outputs"]
        for output in outputs:
            assert output["text"].startswith(prefix)
            if output["finish_reason"] == "eos":
                assert jsonschema_rs.is_valid(CLOSED, json.loads(output["text"]))
        assert any(output["finish_reason"] == "eos" for output in outputs)


@pytest.mark.parametrize(
    "others",
    [{"max_new_tokens": 5}, {"suppress_tokens": list(range(3, 265))}, {"stop": '"'}],
    ids=["length", "forbidden", "stop"],
)
async def test_a_text_that_does_not_match_says_so(running: Running, others: dict[str, Any]) -> None:
    (output,) = (await generate(running, "a dog", constraint={"json_schema": SCHEMA}, **others))["outputs"]
    assert output["finish_reason"] == ("stop" if "stop" in others else "length")


async def test_a_prefix_must_begin_an_allowed_text(running: Running) -> None:
    parameters = {"constraint": {"regex": "ab"}, "target_prefix": "b"}
    status = 422, "invalid_parameter", "parameters.target_prefix"
    assert await running.error("/v1/generate", {"inputs": "a dog", "parameters": parameters}) == status
    wrong: Any
    for wrong in ({}, {"regex": "a", "lark": "a"}, {"regex": 3}, {"json_schema": "x"}, {"regex": "a" * 65_537}):
        body = {"inputs": "a dog", "parameters": {"constraint": wrong}}
        assert (await running.error("/v1/generate", body))[:2] == (422, "invalid_parameter"), wrong
