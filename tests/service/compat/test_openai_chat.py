"""Chat completions of OpenAI, in process, over the fake model: prompts and replies."""

import threading
from typing import Any

import pytest

from sightline.base.bundle import ChatTemplate
from sightline.base.text.chat import ChatFormatter
from sightline.base.text.prompt import Dialogue, Prompt
from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import FakeBackend, Running, Start, generate
from tests.support.dialogues import in_turn
from tests.support.fake_runner import fake_manifest
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "a dog"}]


async def converse(running: Running, messages: Any, **options: Any) -> Any:
    return await running.result("/v1/chat/completions", {"messages": messages, **options})


async def test_a_reply_equals_the_continuation_of_the_dialogue_by_generate(chat: Running) -> None:
    response = await converse(chat, in_turn("a dog", "Hund", "x", system="y"), max_tokens=12)
    own = await generate(chat, "S: y\nU: a dog\nB: Hund\nU: x\nB:", max_new_tokens=12)
    (choice,) = response["choices"]
    assert choice["message"] == {"role": "assistant", "content": own["outputs"][0]["text"], "refusal": None}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "stop")
    input_tokens, output_tokens = own["usage"]["input_tokens"], own["usage"]["output_tokens"]
    assert response["usage"] == {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (response["object"], response["model"]) == ("chat.completion", "fake")
    assert response["id"].startswith("chatcmpl-")


async def test_a_user_may_send_several_messages_in_a_row(chat: Running) -> None:
    dialogue = [{"role": "user", "content": content} for content in ("a dog", "x")]
    response = await converse(chat, dialogue, max_tokens=12)
    own = await generate(chat, "U: a dog\nU: x\nB:", max_new_tokens=12)
    assert response["choices"][0]["message"]["content"] == own["outputs"][0]["text"]


async def test_the_template_reads_the_names_of_authors(chat: Running) -> None:
    named = await converse(chat, [{**HELLO[0], "name": "x"}], max_tokens=12)
    own = await generate(chat, "Ux: a dog\nB:", max_new_tokens=12)
    assert named["choices"][0]["message"]["content"] == own["outputs"][0]["text"]


REJECTING = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
{%- if (m.role == 'user') != loop.first %}{{ raise_exception('no ' + m.content) }}{% endif %}{{ m.content }}
{%- endfor %}</s>"""


async def test_a_template_may_reject_messages(start: Start, tokenizer: TextTokenizer) -> None:
    """System messages that a template rejects are part of the user's message."""
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 90, "max_target_tokens": 120}
    manifest = fake_manifest(decoder_start="source", **sizes)
    manifest = manifest.model_copy(update={"chat": ChatTemplate(program=REJECTING)})
    async with start(FakeBackend(tokenizer, (manifest,))) as running:
        merged = await converse(running, in_turn("a dog", system="x"), max_tokens=9)
        assert merged["choices"] == (await converse(running, in_turn("x\n\na dog"), max_tokens=9))["choices"]
        response = await running.post("/v1/chat/completions", {"messages": [*HELLO, *HELLO]})
        native = await running.post("/v1/attention", {"messages": in_turn("a dog", "x", "secret")})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert error["message"] == "The chat template of fake cannot format these messages: it ends with an error."
    assert native.status_code == 422 and "secret" not in native.text


async def test_a_final_message_of_the_assistant_is_continued(chat: Running, tokenizer: TextTokenizer) -> None:
    response = await converse(chat, in_turn("a dog", "Hund"), max_tokens=12)
    ids = tokenizer.encode("U: a dog\nB: Hund", add_special_tokens=False)
    own = await chat.result("/v1/completions", {"prompt": ids, "max_tokens": 12})
    assert response["choices"][0]["message"]["content"] == own["choices"][0]["text"]


async def test_many_messages_are_formatted_in_another_thread(chat: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, prompt = list[int](), ChatFormatter.prompt

    def recorded(formatter: ChatFormatter, dialogue: Dialogue) -> Prompt:
        threads.append(threading.get_ident())
        return prompt(formatter, dialogue)

    monkeypatch.setattr(ChatFormatter, "prompt", recorded)
    await converse(chat, HELLO, max_tokens=1)
    response = await chat.post("/v1/chat/completions", {"messages": in_turn(*["x"] * 201)})
    assert response.json()["error"]["code"] == "input_too_long"
    assert threads[0] == threading.get_ident() != threads[1]


async def test_parts_are_joined_and_a_reply_can_be_sent_back_unchanged(chat: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "dog"}]
    first = await converse(chat, [{"role": "user", "content": parts}], max_tokens=4)
    assert first["choices"] == (await converse(chat, HELLO, max_tokens=4))["choices"]
    history = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "x", "name": None}]
    assert (await converse(chat, history, max_tokens=4))["choices"][0]["message"]["role"] == "assistant"


async def test_fields_with_their_default_values_change_nothing(chat: Running) -> None:
    harmless: dict[str, Any] = read_table(__file__)
    plain = await converse(chat, HELLO)
    assert (await converse(chat, HELLO, **harmless))["choices"] == plain["choices"]


async def test_both_names_of_the_length_mean_the_same(chat: Running) -> None:
    for options in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        response = await converse(chat, HELLO, ignore_eos=True, **options)
        assert response["usage"]["completion_tokens"] == 5
        assert response["choices"][0]["finish_reason"] == "length"


async def test_logprobs_have_each_token_with_its_bytes(chat: Running) -> None:
    choice = (await converse(chat, HELLO, logprobs=True, top_logprobs=2))["choices"][0]
    own = (await generate(chat, "U: a dog\nB:", top_logprobs=2))["outputs"][0]
    content = choice["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in content] == [
        (token["text"], token["logprob"]) for token in own["tokens"]
    ]
    assert content[-1]["token"] == "</s>" and content[-1]["bytes"] is None
    joined = b"".join(bytes(one["bytes"] or ()) for one in content).decode("utf-8", "replace")
    assert joined.removeprefix(" ") == choice["message"]["content"]
    for one, token in zip(content, own["tokens"], strict=True):
        assert [best["token"] for best in one["top_logprobs"]] == [best["text"] for best in token["alternatives"]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": True, "top_logprobs": 1},
        {"temperature": 1.5, "seed": 3, "n": 2},
        {"max_tokens": 3, "ignore_eos": True},
    ],
)
async def test_a_stream_forms_the_whole_response(chat: Running, options: dict[str, Any]) -> None:
    whole = await converse(chat, HELLO, **options)
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, **options}
    *events, last = await chat.events("/v1/chat/completions", body)
    assert (last["choices"], last["usage"], last["object"]) == ([], whole["usage"], "chat.completion.chunk")
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [one["delta"].get("role") for one in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            assert [token for one in mine for token in one["logprobs"]["content"]] == choice["logprobs"]["content"]


async def test_the_list_of_models_shows_which_models_chat(chat: Running) -> None:
    models = (await chat.client.get("/v1/models")).json()["data"]
    assert {model["id"]: model["chat"] for model in models} == {"fake": True, "mute": False}


async def test_a_placeholder_is_the_default_model_and_the_response_names_it(chat: Running) -> None:
    response = (await chat.post("/v1/chat/completions", {"model": "tgi", "messages": HELLO})).json()
    assert response["model"] == chat.app.state.service.default_model
