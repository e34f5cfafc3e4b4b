"""Messages of a dialogue with a chat model."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from sightline.base.text.prompt import Dialogue
from sightline.service.api_errors import ERRORS, ApiError
from sightline.service.body_fields import RequestBody, field_error, must_equal
from sightline.service.inference.service import ServedModel

MAX_MESSAGES = 1024


def _check_content(value: Any) -> str:
    """Return the text of a message; the texts of several parts are joined with spaces."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise field_error("invalid_parameter", "It must be a string or a list of parts.")
    for index, part in enumerate(parts):
        if part.get("type") != "text":
            raise field_error("unsupported_parameter", "It must be text: other parts are not supported.", index, "type")
        if not isinstance(part.get("text"), str) or len(part) > 2:
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
    PlainValidator(_check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]


class Message(RequestBody):
    """A message of a dialogue. Messages of the service can be sent back unchanged."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], Field(description="Author of the message.")]
    content: Annotated[Content, Field(description="Text, or a list of text parts.")]
    name: Annotated[Any, must_equal("")] = None
    refusal: Annotated[Any, must_equal("")] = None
    tool_calls: Annotated[Any, must_equal([])] = None
    function_call: Annotated[Any, must_equal({})] = None
    audio: Annotated[Any, must_equal({})] = None
    annotations: Annotated[Any, must_equal([])] = None

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")


DIALOGUE = (
    "System messages, if any, then messages of user and assistant, beginning with the user's. The model replies to the "
    "last message, or continues it if it is the assistant's."
)
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description=DIALOGUE)]


def check_dialogue(messages: Sequence[Message]) -> None:
    """Check the roles of the messages of a dialogue, and that the messages are not blank."""
    num_system = len(list(takewhile(lambda message: message.is_system, messages)))
    if num_system == len(messages):
        text = "At least one message must be the user's: the model replies to it."
        raise field_error("invalid_parameter", text, "messages")
    for index, message in enumerate(messages):
        if (message.is_system and index > num_system) or (index == num_system and message.role == "assistant"):
            text = "System messages come first, then messages of user and assistant, beginning with the user's."
            raise field_error("invalid_parameter", text, "messages", index, "role")
        if message.role != "assistant" and not message.content.strip():
            raise field_error("empty_input", ERRORS["empty_input"].message, "messages", index, "content")


def dialogue_of(model: ServedModel, messages: Sequence[Message]) -> Dialogue:
    """Return the messages as a chat template reads them. A model without one raises `ApiError`."""
    if model.chat is None:
        message = f"{model.name} has no chat template, so it cannot chat. GET /v1/models shows which models chat."
        raise ApiError("unsupported_task", message, field="model")
    return Dialogue(
        [{"role": "system" if message.is_system else message.role, "content": message.content} for message in messages]
    )
