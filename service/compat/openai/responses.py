"""OpenAI's POST /v1/responses: the reply of a chat completion as items, without stored state."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import orjson

from sightline.service.api.endpoint import Call, EventStream, event_of
from sightline.service.body_fields import construct
from sightline.service.compat.openai.chat import reply
from sightline.service.compat.openai.chat_schemas import ChatBody
from sightline.service.compat.openai.responses_schemas import LOGPROBS, ModelResponse, ResponsesBody
from sightline.service.compat.openai.schemas import constraint_of_type
from sightline.service.compat.openai.text_response import TextResponse
from sightline.service.inference.generate import GenerateResult
from sightline.service.inference.results import CachedUsage, Usage
from sightline.service.inference.streaming import Stream, StreamedSequence, StreamEnd, StreamToken


async def responses(call: Call, body: ResponsesBody) -> ModelResponse | EventStream:
    """Reply to a dialogue of items.

    With `stream: true` the response is `text/event-stream`, with the events of OpenAI's Responses
    API from `response.created` to `response.completed`, `response.incomplete` or `response.failed`.
    """
    shared = {name: getattr(body, name) for name in body.model_fields_set & ChatBody.model_fields.keys()}
    format_ = body.text and body.text.format
    changed: dict[str, Any] = {"inputs": body.in_chat()[0], "logprobs": LOGPROBS in (body.include or ())}
    if format_:
        changed["constraint"] = constraint_of_type(format_.type, format_.json_schema, "schema")
    chat = construct(ChatBody, **{**shared, **changed})
    call.field_names = {**call.field_names, "constraint": "text.format"}
    choice = chat.tool_choice or "auto"
    repeated = {
        **{name: getattr(body, name) for name in ("instructions", "metadata", "temperature", "top_p", "top_logprobs")},
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "error": None,
        "truncation": "disabled",
        "max_output_tokens": body.max_new_tokens,
        "text": {"format": format_.written() if format_ else {"type": "text"}},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.function.name},
        "tools": [{"type": "function", **tool.function.model_dump()} for tool in chat.tools or ()],
    }
    form = partial(ItemsResponse, kind="response", prefix="resp", repeated=repeated)
    return cast(ModelResponse | EventStream, await reply(call, chat, form))


class ItemsResponse(TextResponse):
    """A response whose items are made from the parts of a chat completion."""

    def __init__(self, *args: Any, repeated: Mapping[str, Any], **options: Any) -> None:
        """`repeated` are fields of the response that repeat those of the request."""
        super().__init__(*args, **options)
        self._head |= {"created_at": self._head.pop("created"), **repeated}
        self._items: list[dict[str, Any]] = []
        self._tokens: list[Any] = []  # log-probabilities of tokens whose text has not come yet
        self._status = "in_progress"
        self._num_events = 0

    def whole(self, result: GenerateResult) -> Any:
        choice = self.make_choice(0).whole(result.outputs[0])
        self._add(choice["message"], choice["logprobs"])
        self._finish(choice["finish_reason"])
        return self._response(result.usage)

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        choice = self.choices[0].token(event)
        return self._begin() + self._add(choice["delta"], choice["logprobs"])

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        choice = self.choices[0].end(event)
        return self._add(choice["delta"], choice["logprobs"]) + self._finish(choice["finish_reason"])

    def close(self, stream: Stream) -> bytes:
        return self._write(f"response.{self._status}", response=self._response(stream.usage))

    def error(self, body: bytes) -> bytes:
        first, self._status = self._begin(), "failed"
        self._head["error"] = {"code": "server_error", "message": orjson.loads(body)["error"]["message"]}
        return first + self._write("response.failed", response=self._response())

    def _response(self, usage: Usage | None = None) -> dict[str, Any]:
        written = usage and {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens if isinstance(usage, CachedUsage) else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        }
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        state = {"status": self._status, "incomplete_details": details, "output": self._items, "usage": written}
        return {**self._head, **state}

    def _write(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\n".encode() + event_of(content)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Write an event about the last item."""
        place = {"item_id": self._items[-1]["id"]}
        if self._items[-1]["type"] == "message":
            place["content_index"] = 0
        return self._write(f"response.{kind}", output_index=len(self._items) - 1, **place, **fields)

    # The following change the items and return the events of the changes.

    def _begin(self) -> bytes:
        kinds = () if self._num_events else ("response.created", "response.in_progress")
        return b"".join([self._write(kind, response=self._response()) for kind in kinds])

    def _add(self, message: Mapping[str, Any], logprobs: Any, *, is_last: bool = False) -> bytes:
        """Add the text and the calls of a message, or of a part of one.

        A reply without any item is an empty message.
        """
        events, text = b"", message.get("content") or ""
        self._tokens += [_with_bytes(token) for token in (logprobs or {}).get("content", ())]
        if (text and self._last_type != "message") or (is_last and not self._items):
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._add_item("message", "msg", {"role": "assistant", "content": []})
            self._items[-1]["content"].append(part)
            events += self._item_event("content_part.added", part=part)
        if text or (self._tokens and self._last_type == "message"):
            events += self._item_event("output_text.delta", delta=text, logprobs=self._tokens)
            part = self._items[-1]["content"][0]
            part["text"] += text
            part["logprobs"] += self._tokens
            self._tokens = []
        for call in message.get("tool_calls") or ():
            if call.get("id"):
                function = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                events += self._add_item("function_call", "fc", function)
            self._items[-1]["arguments"] += call["function"]["arguments"]
            events += self._item_event("function_call_arguments.delta", delta=call["function"]["arguments"])
        if self._last_type == "function_call":
            self._tokens = []  # an item of this type has no log-probabilities
        return events

    @property
    def _last_type(self) -> str | None:
        return self._items[-1]["type"] if self._items else None

    def _add_item(self, kind: str, prefix: str, fields: Mapping[str, Any]) -> bytes:
        events = self._end_item("completed") if self._items else b""
        index = len(self._items)
        item = {"id": f"{prefix}_{self.call.request_id}_{index}", "type": kind, **fields, "status": "in_progress"}
        self._items.append(item)
        return events + self._write("response.output_item.added", output_index=index, item=item)

    def _end_item(self, status: str) -> bytes:
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            events = self._item_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
            events += self._item_event("content_part.done", part=part)
        else:
            done = {name: item[name] for name in ("name", "arguments")}
            events = self._item_event("function_call_arguments.done", **done)
        return events + self._write("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _finish(self, reason: str) -> bytes:
        self._status = "incomplete" if reason == "length" else "completed"
        return self._add({}, None, is_last=True) + self._end_item(self._status)


def _with_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token of a chat completion, whose bytes may be null there."""
    more = {"top_logprobs": list(map(_with_bytes, token["top_logprobs"]))} if "top_logprobs" in token else {}
    return {**token, "bytes": token["bytes"] or [], **more}
