"""Messages of a dialogue with a chat model."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PlainValidator, WithJsonSchema

from sightline.base.text.prompt import Dialogue
from sightline.base.text.tool_calls import ToolFormat
from sightline.service.api.tools import OfferedTools
from sightline.service.api_errors import ERRORS, ApiError
from sightline.service.body_fields import RequestBody, check_nesting, field_error, must_equal
from sightline.service.inference.service import ServedModel

MAX_MESSAGES = 1024


def check_content(value: Any, kinds: Sequence[str] = ("text",), ignored: Sequence[str] = ()) -> str:
    """Return the text of a message; the texts of several parts are joined with spaces.

    A part has a type of `kinds`, and may have the fields `ignored`.
    """
    parts = [{"type": kinds[0], "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise field_error("invalid_parameter", "It must be a string or a list of parts.")
    for index, part in enumerate(parts):
        if part.get("type") not in kinds:
            message = f"It must be {' or '.join(kinds)}: other parts are not supported."
            raise field_error("unsupported_parameter", message, index, "type")
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text", *ignored}:
            raise field_error("invalid_parameter", "It must have the fields type and text and no others.", index)
    return " ".join(part["text"] for part in parts)


_PART_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "text", "description": "Always `text`."},
        "text": {"type": "string", "description": "Text of the part."},
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
Content = Annotated[
    str,
    PlainValidator(check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]


def _check_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call, which may be an object or its text."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # half a character is no text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise field_error("invalid_parameter", "It must be a JSON object, or the text of one.")
    return cast(dict[str, Any], check_nesting(arguments))


Arguments = Annotated[
    dict[str, Any],
    PlainValidator(_check_arguments),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]


class CalledFunction(RequestBody):
    name: Annotated[str, Field(description="Name of the function.")]
    arguments: Annotated[Arguments, Field(description="Arguments as a JSON object or its text.")]


class MessageCall(RequestBody):
    """A call of a tool in an earlier reply."""

    id: str | None = Field(default=None, description="Id of the call, which its result repeats.")
    type: Literal["function"] | None = Field(default=None, description="Always `function`.")
    index: int | None = Field(default=None, description="Accepted for compatibility; ignored.")
    function: Annotated[CalledFunction, Field(description="The function.")]

    def for_template(self, tools: ToolFormat) -> Mapping[str, Any]:
        function = {"name": self.function.name, "arguments": tools.arguments_of(self.function.arguments)}
        return {**({"id": tools.id_of(self.id)} if self.id else {}), "type": "function", "function": function}


class Message(RequestBody):
    """A message of a dialogue. Messages of the service can be sent back unchanged."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        Field(description="Author of the message; `tool` for the result of a call."),
    ]
    content: Annotated[Content | None, Field(description="Text, or a list of text parts; optional beside calls.")] = (
        None
    )
    name: Annotated[str, Field(max_length=64, description="Name of the author, if the template uses it.")] | None = None
    refusal: Annotated[Any, must_equal("")] = None
    tool_calls: list[MessageCall] | None = Field(default=None, description="Calls of tools in a reply.")
    tool_call_id: str | None = Field(default=None, description="Id of the call that has this result.")
    function_call: Annotated[Any, must_equal({}, "send `tool_calls`")] = None
    audio: Annotated[Any, must_equal({})] = None
    annotations: Annotated[Any, must_equal([])] = None

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")

    @property
    def author(self) -> str | None:
        return self.name

    def for_template(self, tools: ToolFormat) -> Mapping[str, Any]:
        """Return the message as a chat template reads it."""
        message: dict[str, Any] = {"role": "system" if self.is_system else self.role, "content": self.content or ""}
        message |= {"name": self.author} if self.author else {}
        message |= {"tool_call_id": tools.id_of(self.tool_call_id)} if self.tool_call_id else {}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template(tools) for call in self.tool_calls]
        return message


DIALOGUE = (
    "System messages, if any, then messages of user and assistant and results of tools, beginning with the user's. The "
    "model replies to the last message, or continues it if it is the assistant's."
)
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description=DIALOGUE)]


def check_dialogue(messages: Sequence[Message]) -> None:
    """Check the roles of the messages of a dialogue, and that the messages are not blank."""
    num_system = len(list(takewhile(lambda message: message.is_system, messages)))
    if num_system == len(messages):
        text = "At least one message must be the user's: the model replies to it."
        raise field_error("invalid_parameter", text, "messages")
    for index, message in enumerate(messages):
        if (message.is_system and index > num_system) or (index == num_system and message.role != "user"):
            text = "System messages come first, then messages of user, assistant and tool, beginning with the user's."
            raise field_error("invalid_parameter", text, "messages", index, "role")
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(message, field) and message.role != role:
                text = f"It is only for messages of the role {role}."
                raise field_error("invalid_parameter", text, "messages", index, field)
        if message.content is None and not message.tool_calls:
            raise field_error("invalid_parameter", "It is required.", "messages", index, "content")
        if message.role not in ("assistant", "tool") and not (message.content or "").strip():
            raise field_error("empty_input", ERRORS["empty_input"].message, "messages", index, "content")
    if messages[-1].tool_calls:
        text = "The results of these calls must follow, in messages of the role tool."
        raise field_error("invalid_parameter", text, "messages", len(messages) - 1, "tool_calls")


def dialogue_of(model: ServedModel, messages: Sequence[Message], tools: OfferedTools | None = None) -> Dialogue:
    """Return messages and the definitions of tools as a chat template reads them.

    A model without a template raises `ApiError`.
    """
    if model.chat is None:
        message = f"{model.name} has no chat template, so it cannot chat. GET /v1/models shows which models chat."
        raise ApiError("unsupported_task", message, field="model")
    format_ = model.tool_format or ToolFormat()
    return Dialogue([message.for_template(format_) for message in messages], tools.definitions if tools else None)
