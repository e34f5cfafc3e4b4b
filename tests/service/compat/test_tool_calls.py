"""Tools in the APIs of OpenAI and Ollama, through their unmodified packages.

The model replies with texts that each test chooses.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ollama import Client
from openai import BadRequestError, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from tokenizers import Tokenizer

from sightline.base.bundle import ChatTemplate
from sightline.base.text.chat import ChatFormatter
from sightline.base.text.prompt import Dialogue
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.engine.request import GenerateRequest
from tests.base.text.test_tool_calls import TEMPLATES
from tests.export.chat_templates import SPECIAL, TOOLS_AS_JSON
from tests.service.conftest import END, FakeBackend, Serve, Wire, byte_level_tokenizer
from tests.support.dialogues import LINES
from tests.support.fake_runner import fake_manifest

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "<|x|>", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
QUESTION: Any = {"role": "user", "content": "Rain in Rome?"}
ROME = '{"city": "Rome </tool_call>"}'
CALLS = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
CALLS += '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
MARKER = "[TOOL_CALLS]"
Say = Callable[[str], None]


def tokenizer_with_marker() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([MARKER])
    return tokenizer


@pytest.fixture(scope="module")
def wire(serve: Serve) -> Iterator[Wire]:
    """A service with three models. Calls of mistral begin with a special token; plain has none."""
    tokenizer = TextTokenizer(tokenizer_with_marker())
    sizes: dict[str, Any] = {"vocabulary": len(tokenizer), "max_source_tokens": 1200, "max_target_tokens": 1500}
    programs = {"hermes": TOOLS_AS_JSON, "mistral": TEMPLATES["Mistral"]}
    chats = {name: ChatTemplate(program=text, tokens=SPECIAL, takes_tools=True) for name, text in programs.items()}
    manifests = tuple(
        fake_manifest(name, decoder_start="source", **sizes).model_copy(update={"chat": chat})
        for name, chat in {**chats, "plain": LINES}.items()
    )
    with serve(FakeBackend(tokenizer, manifests), default_model="hermes") as wire:
        yield wire


@pytest.fixture
def say(wire: Wire) -> Say:
    """Return a function that sets the reply of all models."""
    tokenizer = tokenizer_with_marker()

    def set_reply(text: str) -> None:
        tokenizer.encode_special_tokens = False
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for runner in wire.backend.runners:
            runner.script = [*ids, tokenizer.token_to_id(END) or 0]

    return set_reply


@pytest.fixture(scope="module")
def openai(wire: Wire) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{wire.port}/v1", api_key="none", timeout=20) as client:
        yield client


@pytest.mark.parametrize(
    ("model", "reply"),
    [
        ("hermes", CALLS),
        ("mistral", f'{MARKER} [{{"name": "weather", "arguments": {ROME}}}, {{"name": "time", "arguments": {{}}}}]'),
    ],
)
def test_calls_of_a_reply_are_returned_whole_and_streamed(openai: OpenAI, say: Say, model: str, reply: str) -> None:
    say(f"Wait.\n{reply}")
    request: dict[str, Any] = {"model": model, "messages": [QUESTION], "tools": TOOLS, "max_tokens": 250}
    (choice,) = openai.chat.completions.create(**request).choices
    message, calls = choice.message, choice.message.tool_calls or []
    assert (message.content, choice.finish_reason) == ("Wait.", "tool_calls")
    found = [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
    assert found == [("weather", ROME), ("time", "{}")]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
    with openai.chat.completions.stream(**request) as events:
        streamed = events.get_final_completion().choices[0]
    assert (streamed.message.content, streamed.finish_reason) == ("Wait.", "tool_calls")
    functions = [call.function for call in streamed.message.tool_calls or []]
    assert [(one.name, one.arguments) for one in functions] == found
    (single,) = openai.chat.completions.create(**request, parallel_tool_calls=False).choices
    assert [call.id != calls[0].id for call in single.message.tool_calls or []] == [True]
    say(reply)
    assert openai.chat.completions.create(**request).choices[0].message.content is None


def test_a_response_has_calls_as_items_which_can_be_sent_back_with_their_outputs(
    openai: OpenAI, say: Say, submitted: list[tuple[str, GenerateRequest]]
) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    request: dict[str, Any] = {"model": "hermes", "tools": flat, "max_output_tokens": 250}
    say(f"Wait.\n{CALLS}")
    whole = openai.responses.create(input=[QUESTION], **request)
    Response.model_validate(whole.model_dump(), strict=True)
    with openai.responses.stream(input=[QUESTION], **request) as events:
        kinds = [event.type.removeprefix("response.") for event in events]
        streamed: Any = events.get_final_response()
    arguments = [kind for kind in kinds if kind.startswith("function_call_arguments")]
    assert (kinds.count("output_item.added"), arguments[-1]) == (3, "function_call_arguments.done")
    for response in (whole, streamed):
        message, *calls = response.output
        assert (response.status, response.output_text, message.type) == ("completed", "Wait.", "message")
        assert [(call.name, call.arguments) for call in calls] == [("weather", ROME), ("time", "{}")]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "20"} for call in calls]
    history: Any = [QUESTION, *streamed.output, *outputs]
    openai.responses.create(input=history, **request)
    said = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    results = [{"role": "tool", "tool_call_id": call.call_id, "content": "20"} for call in calls]
    messages: Any = [QUESTION, {"role": "assistant", "content": "Wait.", "tool_calls": said}, *results]
    openai.chat.completions.create(model="hermes", messages=messages, tools=TOOLS, max_tokens=250)
    assert submitted[-1][1].source_ids == submitted[-2][1].source_ids
    required = openai.responses.create(input="x", tool_choice={"type": "function", "name": "weather"}, **request)
    assert [item.name for item in required.output if item.type == "function_call"] == ["weather"]


def test_a_response_matches_the_schema_of_its_format(openai: OpenAI, say: Say) -> None:
    class Weather(BaseModel):
        rain: bool

    say("It rains.")
    parsed = openai.responses.parse(model="hermes", input="x", text_format=Weather, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Weather)
    assert parsed.text is not None and parsed.text.format is not None and parsed.text.format.type == "json_schema"
    with openai.responses.stream(model="hermes", input="x", text_format=Weather, max_output_tokens=60) as events:
        assert events.get_final_response().output_parsed == parsed.output_parsed


def test_a_reply_without_a_valid_call_stays_text(openai: OpenAI, say: Say) -> None:
    request: dict[str, Any] = {"model": "hermes", "messages": [QUESTION], "tools": TOOLS, "max_tokens": 250}
    for reply in ("It rains. \n", "<tool_call>\nweather(Rome)\n</tool_call>", CALLS[:60]):
        say(reply)
        (choice,) = openai.chat.completions.create(**request, logprobs=True).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (reply, None, "stop")
        *chunks, last = openai.chat.completions.create(**request, stream=True, logprobs=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in (*chunks, last)) == reply
        assert last.choices[0].finish_reason == "stop"
        tokens = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
        assert choice.logprobs is not None and [one for some in tokens for one in some or ()] == choice.logprobs.content
    say(CALLS)
    (cut,) = openai.chat.completions.create(**{**request, "max_tokens": 60}).choices
    assert cut.message.content == CALLS[: len(cut.message.content or "")] != "" and cut.finish_reason == "length"
    assert openai.chat.completions.create(**request, tool_choice="none").choices[0].message.content == CALLS


def test_the_template_gets_definitions_calls_and_results(
    wire: Wire, openai: OpenAI, say: Say, submitted: list[tuple[str, GenerateRequest]]
) -> None:
    """Arguments are objects there, and ids have the length that the template needs."""
    say("No.")
    id_ = "call_0123456789abcdef01234567"
    call = {"id": id_, "type": "function", "function": {"name": "weather", "arguments": ROME}}
    asked: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": id_, "content": "[TOOL_CALLS]</s> 20"}
    for model, shown_id in (("hermes", id_), ("mistral", "f01234567")):
        openai.chat.completions.create(model=model, messages=[QUESTION, asked, result], tools=TOOLS, max_tokens=4)
        function = {"name": "weather", "arguments": json.loads(ROME)}
        shown = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": shown_id, "function": function}]}
        tokenizer = wire.backend.tokenizer
        chat = next(manifest.chat for manifest in wire.backend.manifests if manifest.name == model)
        assert chat is not None
        dialogue = Dialogue([QUESTION, shown, {**result, "tool_call_id": shown_id}], TOOLS)
        name, request = submitted.pop()
        assert (name, list(request.source_ids)) == (
            model,
            ChatFormatter(chat, tokenizer).prompt(dialogue).encode(tokenizer),
        )
        assert list(request.source_ids).count(tokenizer.token_id(MARKER) or 0) == (model == "mistral")


def test_ollama_returns_complete_calls(wire: Wire, say: Say, submitted: list[tuple[str, GenerateRequest]]) -> None:
    say(f"Wait.\n{CALLS}")
    with Client(f"http://127.0.0.1:{wire.port}") as client:
        whole = client.chat("hermes", [QUESTION], tools=TOOLS).message
        assert whole.content == "Wait." and whole.tool_calls is not None
        found = [(call.function.name, call.function.arguments) for call in whole.tool_calls]
        assert found == [("weather", json.loads(ROME)), ("time", {})]
        parts = list(client.chat("hermes", [QUESTION], tools=TOOLS, stream=True))
        assert "".join(part.message.content or "" for part in parts) == "Wait."
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert calls == whole.tool_calls and parts[-1].done_reason == "stop"
        say("No.")
        result = {"role": "tool", "tool_name": "weather", "content": "20"}
        reply = client.chat("hermes", [QUESTION, whole, result], tools=TOOLS).message
        assert (reply.content, reply.tool_calls) == ("No.", None)
        assert client.show("hermes").capabilities == ["completion", "embedding", "tools"]
        assert "tools" not in (client.show("plain").capabilities or ())


@pytest.mark.parametrize("model", ["hermes", "mistral"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_model_can_be_made_to_call(wire: Wire, openai: OpenAI, say: Say, model: str, choice: Any) -> None:
    """Also one that would write anything else; the arguments match the schema."""
    say("No, it is sunny.")
    parameters: Any = {"type": "object", "properties": {"at": {"enum": ["noon", "night"]}}, "required": ["at"]}
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("time", "w.x")
    ]
    request: dict[str, Any] = {"model": model, "messages": [QUESTION], "tools": tools, "tool_choice": choice}
    request |= {"max_tokens": 250, "parallel_tool_calls": False}
    (whole,) = openai.chat.completions.create(**request).choices
    (call,) = list(whole.message.tool_calls or [])
    assert whole.finish_reason == "tool_calls" and not whole.message.content and call.type == "function"
    assert call.function.name in ("time", *(["w.x"] if choice == "required" else []))
    assert json.loads(call.function.arguments) in ({"at": "noon"}, {"at": "night"})
    chunks = list(openai.chat.completions.create(**request, stream=True))
    deltas = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    first, *others = [part.function for part in deltas if part.function]
    assert first.name == call.function.name and others and not any(other.name for other in others)
    assert "".join(part.arguments or "" for part in (first, *others)) == call.function.arguments
    unsupported = [{"type": "function", "function": {"name": "time", "parameters": {"uniqueItems": True}}}]
    with pytest.raises(BadRequestError, match="tools uses keywords that are not supported: uniqueItems") as caught:
        openai.chat.completions.create(**{**request, "tools": unsupported})
    assert caught.value.param == "tools"
    with pytest.raises(BadRequestError, match="cannot be combined with response_format"):
        openai.chat.completions.create(**request, response_format={"type": "json_object"})


@pytest.mark.download
def test_other_packages_send_tools_and_read_calls(wire: Wire, say: Say, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    packages = ("langchain-openai", "litellm", "llama-index-llms-openai-like")
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    say(f"Wait.\n{CALLS}")
    expected = json.dumps([("weather", json.loads(ROME)), ("time", {})])
    command = [str(python), "tests/clients/tools_program.py", f"http://127.0.0.1:{wire.port}", expected]
    subprocess.run(command, check=True)
