"""OpenAI's Responses API, in process, over the fake model; its objects are those of the client."""

from typing import Any

import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, Running, Start, chat_backend
from tests.support.dialogues import in_turn
from tests.support.fake_runner import Faults
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def respond(running: Running, said: Any, **options: Any) -> Any:
    response = await running.result("/v1/responses", {"input": said, **options})
    Response.model_validate(response, strict=True)
    return response


async def events_of(running: Running, said: Any, **options: Any) -> list[Any]:
    """Return the events of a stream, of which each has its number and a name in the frame."""
    response = await running.post("/v1/responses", {"input": said, "stream": True, **options})
    *frames, rest = response.text.split("\n\n")
    events = [orjson.loads(frame.partition("\ndata: ")[2]) for frame in frames]
    assert rest == "" and [frame.partition("\n")[0] for frame in frames] == [f"event: {one['type']}" for one in events]
    assert [one["sequence_number"] for one in events] == [*range(len(events))]
    for one in events:
        EVENT.validate_python(one, strict=True)
    return events


ITEMS: Any = [
    {"role": "developer", "content": "y"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a dog"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}], "id": "1"},
    {"role": "user", "content": "x"},
]


@pytest.mark.parametrize(
    ("said", "options", "dialogue", "same"),
    [
        (ITEMS, {"max_output_tokens": 5, "ignore_eos": True}, in_turn("a dog", *"xx", system="y"), {"max_tokens": 5}),
        ("x", {"temperature": 1.5, "seed": 3}, in_turn("x"), {"temperature": 1.5, "seed": 3}),
        ("x", {"instructions": "y", **LOGPROBS}, in_turn("x", system="y"), {"logprobs": True, "top_logprobs": 2}),
    ],
)
async def test_a_response_is_the_reply_of_a_chat_completion(
    chat: Running, said: Any, options: dict[str, Any], dialogue: Any, same: dict[str, Any]
) -> None:
    response = await respond(chat, said, **options)
    same |= {"ignore_eos": options.get("ignore_eos")}
    completion = await chat.result("/v1/chat/completions", {"messages": dialogue, **same})
    (choice,), usage, (item,) = completion["choices"], completion["usage"], response["output"]
    (part,) = item["content"]
    tokens = (choice["logprobs"] or {"content": []})["content"]
    assert (part["text"], [token["logprob"] for token in part["logprobs"]]) == (
        choice["message"]["content"],
        [token["logprob"] for token in tokens],
    )
    is_cut = choice["finish_reason"] == "length"
    assert response["status"] == item["status"] == ("incomplete" if is_cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [response["usage"][name] for name in counts] == [*usage.values()][:3]


@pytest.mark.parametrize("options", [{"instructions": "y"}, LOGPROBS, {"max_output_tokens": 3, "ignore_eos": True}])
async def test_a_stream_forms_the_whole_response(chat: Running, options: dict[str, Any]) -> None:
    whole = await respond(chat, "a dog", **options)
    first, second, *events, last = await events_of(chat, "a dog", **options)
    kinds = [one["type"].removeprefix("response.") for one in (first, second, *events, last)]
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas)),
        *("output_text.done", "content_part.done", "output_item.done", whole["status"]),
    ]
    begun = first["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    (item,), (mine,) = whole["output"], last["response"]["output"]
    item["id"], whole["id"], whole["created_at"] = mine["id"], begun["id"], begun["created_at"]
    assert last["response"] == whole and events[-1]["item"] == item
    assert "".join(one["delta"] for one in deltas) == item["content"][0]["text"] == events[-3]["text"]
    assert [token for one in deltas for token in one["logprobs"]] == item["content"][0]["logprobs"]


async def test_a_failure_in_a_stream_is_its_last_event(start: Start, tokenizer: TextTokenizer) -> None:
    backend = FakeBackend(tokenizer, chat_backend(tokenizer).manifests, faults=Faults(step_calls=frozenset({4})))
    async with start(backend) as running:
        first, *_, last = await events_of(running, "a dog", min_tokens=20)
    assert (first["type"], last["type"], last["response"]["status"]) == (
        "response.created",
        "response.failed",
        "failed",
    )
    assert last["response"]["error"]["code"] == "server_error" and last["response"]["error"]["message"]


async def test_fields_with_their_default_values_change_nothing(chat: Running) -> None:
    harmless: dict[str, Any] = read_table(__file__)
    plain = await respond(chat, "a dog")
    assert (await respond(chat, "a dog", **harmless))["output"][0]["content"] == plain["output"][0]["content"]
