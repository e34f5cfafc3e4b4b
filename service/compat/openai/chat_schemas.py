"""Requests and responses of OpenAI's chat completions. In a request, null equals omitting the field."""

from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from typing_extensions import TypedDict

from service.compat.openai.schemas import TOGETHER, CompletionUsage, DecodingBody
from service.fields import NOT_BLANK, NULL, RequestBody, case, only, refusal
from service.parameters import NumNewTokens, TopLogprobs

MAX_MESSAGES = 1024


def _check_content(value: Any) -> str:
    """One text, or the texts of its parts with a blank between them."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise refusal("invalid_parameter", "It must be a string or a list of parts.")
    for place, part in enumerate(parts):
        if part.get("type") != "text":
            raise refusal("unsupported_parameter", "A part can only be text.", place, "type")
        if not isinstance(part.get("text"), str) or len(part) > 2:
            raise refusal("invalid_parameter", "A part has a type and a text and nothing else.", place)
    return " ".join(part["text"] for part in parts)


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Content = Annotated[
    str,
    PlainValidator(_check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]


class Message(RequestBody):
    """What somebody says. An answer of the service can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[Any, only("")] = None
    refusal: Annotated[Any, only("")] = None
    tool_calls: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only({})] = None
    audio: Annotated[Any, only({})] = None
    annotations: Annotated[Any, only([])] = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                case(role={"const": "assistant"}),
                case(content={"type": "string", "pattern": NOT_BLANK}),
                case(content={"type": "array", "contains": case("text", text={"pattern": NOT_BLANK})}),
            ]
        }
    )

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")


class ChatBody(DecodingBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="What the system says, if anything, then user and assistant in turn; the user is first and last."
    )
    max_completion_tokens: NumNewTokens | None = Field(default=None, description="The same as max_tokens.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = Field(default=None, description="Needs logprobs: true.")
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none")] = None
    parallel_tool_calls: bool | None = Field(default=None, description="Accepted for compatibility; ignored.")
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none")] = None
    store: Annotated[Any, only(False)] = None
    metadata: dict[str, str] | None = Field(default=None, description="Accepted for compatibility; ignored.")
    service_tier: Annotated[Any, only("auto")] = None
    safety_identifier: str | None = Field(default=None, description="Accepted for compatibility; ignored.")
    prompt_cache_key: str | None = Field(default=None, description="Accepted for compatibility; ignored.")
    prediction: Annotated[Any, only({})] = None
    audio: Annotated[Any, only({})] = None
    web_search_options: Annotated[Any, only({})] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    verbosity: Annotated[Any, only("medium")] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "smalltalk-chat-gatt", "messages": [{"role": "user", "content": "Hello!"}]},
                {
                    "messages": [
                        {"role": "system", "content": "Always answer in capitals."},
                        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
                        {"role": "assistant", "content": "HELLO!"},
                        {"role": "user", "content": "How are you?"},
                    ],
                    "max_completion_tokens": 24,
                    "logprobs": True,
                    "top_logprobs": 2,
                },
                {"messages": [{"role": "user", "content": "Hello!"}], "stream": True},
            ],
            "allOf": [
                *TOGETHER,
                {"anyOf": [case("logprobs", logprobs={"const": True}), case(top_logprobs=NULL)]},
            ],
        }
    )

    @property
    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _is_a_dialogue(self) -> Self:
        num_system = len(list(takewhile(lambda message: message.is_system, self.messages)))
        for place, message in enumerate(self.messages):
            turn = place - num_system
            wanted = ("system", "developer") if turn < 0 else ("assistant",) if turn % 2 else ("user",)
            if message.role not in wanted:
                text = "The system comes first, then user and assistant in turn, the user before the assistant."
                raise refusal("invalid_parameter", text, "messages", place, "role")
            if message.role != "assistant" and not message.content.strip():
                raise refusal("empty_input", "There is nothing but blanks in it.", "messages", place, "content")
        if self.messages[-1].role != "user":
            text = "The last message must be the user's: it is what is answered."
            raise refusal("invalid_parameter", text, "messages", len(self.messages) - 1, "role")
        return self

    @model_validator(mode="after")
    def _fits_its_answer(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            message = "max_tokens and max_completion_tokens are one thing: send one of them."
            raise refusal("invalid_parameter", message, "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("invalid_parameter", "top_logprobs needs logprobs: true.", "top_logprobs")
        return self


class ChatToken(TypedDict):
    token: str
    logprob: float
    bytes: Annotated[list[int] | None, Field(description="Null of the end token.")]


class ChosenToken(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    content: list[ChosenToken]
    refusal: None


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(TypedDict):
    """A stream's events are like it: `object` ends with `.chunk`, and `delta` has the new parts of `message`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
