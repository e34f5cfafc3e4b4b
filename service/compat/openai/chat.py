"""OpenAI's POST /v1/chat/completions, for models whose bundle has a chat template."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from sightline.base.text.tool_calls import CallPart
from sightline.service.api.endpoint import Call, EventStream
from sightline.service.api.messages import dialogue_of
from sightline.service.api.tools import OfferedTools, constrain, offer_tools
from sightline.service.compat.common import FINISH_REASONS, blank_before, named_model
from sightline.service.compat.openai.chat_schemas import ChatBody, ChatCompletion, ChatLogprobs, ChatToken
from sightline.service.compat.openai.schemas import decoding_parameters
from sightline.service.compat.openai.text_response import TextResponse
from sightline.service.inference.generate import GenerateOutput
from sightline.service.inference.results import OutputToken, alternatives_of
from sightline.service.inference.service import ServedModel
from sightline.service.inference.streaming import StreamEnd, StreamToken


async def chat_completions(call: Call, body: ChatBody) -> ChatCompletion | EventStream:
    """Reply to the last message of a dialogue.

    With `stream: true` the response is `text/event-stream`: one event for each token, one at each
    choice's end, one with the usage if `stream_options` ask for it, then `[DONE]`.
    """
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return cast(
        ChatCompletion | EventStream, await reply(call, body, partial(TextResponse, kind=kind, prefix="chatcmpl"))
    )


async def reply(call: Call, body: ChatBody, form: Callable[..., TextResponse]) -> Any:
    """Return the reply to a dialogue in the form of an API."""
    model = await call.model(named_model(call, body.model), "generate", default_for="chat")
    tools = offer_tools(model, body.tools, body.tool_choice, are_parallel=body.parallel_tool_calls is not False)
    prompt = dialogue_of(model, body.inputs, tools)
    model = model.with_markers() if tools else model
    if body.max_completion_tokens is not None:
        call.field_names = {**call.field_names, "max_new_tokens": "max_completion_tokens"}
    parameters = decoding_parameters(call, body, model)
    if tools and tools.constraint:
        parameters = constrain(call, parameters, tools.constraint)
    return await form(call, model, body, partial(ChatChoiceWriter, model, body, tools)).of(prompt, parameters)


class ChatChoiceWriter:
    """One message of a response, written at once or token by token."""

    def __init__(self, model: ServedModel, body: ChatBody, tools: OfferedTools | None, index: int) -> None:
        self._model = model
        self._continues = body.inputs[-1].role == "assistant"
        self._returns_logprobs = bool(body.logprobs)
        self._index = index
        self._role = {"role": "assistant"}  # in a stream, only in the first event
        self._parser = tools.parser() if tools else None

    def whole(self, output: GenerateOutput) -> dict[str, Any]:
        fields = self._read(self._blank_before(output.tokens) + output.text, is_end=True)
        for call in fields.get("tool_calls", ()):
            del call["index"]
            fields["content"] = fields["content"] or None
        message = {**self._role, **fields, "refusal": None}
        return self._write("message", message, output.tokens, output.finish_reason)

    def token(self, event: StreamToken) -> dict[str, Any]:
        delta = {**self._role, **self._read(self._blank_before([event.token]) + event.text)}
        self._role = {}
        self._continues = False
        return self._write("delta", delta, [event.token], None)

    def end(self, event: StreamEnd) -> dict[str, Any]:
        delta = {name: value for name, value in self._read("", is_end=True).items() if value}
        return self._write("delta", delta, [], event.finish_reason)

    def _read(self, text: str, *, is_end: bool = False) -> dict[str, Any]:
        """Return the fields of what is known now of the text of the reply and of its calls."""
        content, parts = self._parser.read(text, is_end=is_end) if self._parser else (text, [])
        return {"content": content, **({"tool_calls": list(map(_written, parts))} if parts else {})}

    def _blank_before(self, tokens: Sequence[OutputToken]) -> str:
        """Return the space between the message that the model continues and its first new token."""
        return blank_before(self._model, tokens[0]) if self._continues else ""

    def _write(
        self, field: str, message: Mapping[str, Any], tokens: Sequence[OutputToken], reason: str | None
    ) -> dict[str, Any]:
        if reason:
            reason = "tool_calls" if self._parser and self._parser.num_calls and reason != "length" else reason
        return {
            "index": self._index,
            field: message,
            "logprobs": self._logprobs(tokens) if self._returns_logprobs else None,
            "finish_reason": reason and FINISH_REASONS.get(reason, reason),
        }

    def _logprobs(self, tokens: Sequence[OutputToken]) -> ChatLogprobs:
        return {
            "content": [
                {**self._named(token), "top_logprobs": [self._named(top) for top in alternatives_of(token)]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _named(self, token: OutputToken) -> ChatToken:
        data = self._model.target_tokenizer.bytes_of(token.id)
        return {"token": token.text, "logprob": token.logprob, "bytes": list(data) or None}


def _written(part: CallPart) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
