"""Requests and responses of OpenAI's Responses API; null in a request omits the field."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from sightline.service.api.messages import MAX_MESSAGES, Arguments, Message, check_content, check_dialogue
from sightline.service.api.tools import MAX_TOOLS, FunctionDefinition, ToolDefinition, check_tool_choice
from sightline.service.body_fields import RequestBody, check_text, construct, field_error, must_equal
from sightline.service.compat.common import Ignored
from sightline.service.compat.openai.schemas import DecodingBody, FormatType, constraint_of_type
from sightline.service.constraints import JsonSchema
from sightline.service.parameters import DEFAULT_LENGTH, NumNewTokens, TopLogprobs

LOGPROBS = "message.output_text.logprobs"
NOT_STORED = "nothing is stored, so send the whole dialogue in `input`"
# Fields of an item that are required, by its type; those of other types are not allowed.
FIELDS_OF_ITEMS: dict[str | None, Sequence[str]] = {
    None: ("role", "content"),
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


def _of_type(*types: str | None) -> BeforeValidator:
    """Return the validator of the type of an object; None is that of objects without a type."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in types:
            text = f"It must be {', '.join(filter(None, types))}: other types are not supported."
            raise field_error("unsupported_parameter", text, "type")
        return value

    return BeforeValidator(check)


class InputPart(RequestBody):
    type: Annotated[Literal["input_text", "output_text"], Field(description="Both are text.")]
    text: Annotated[str, Field(description="Text of the part.")]
    annotations: Ignored[list[Any]] = None
    logprobs: Ignored[list[Any]] = None


def _check_parts(value: Any) -> str:
    return check_content(value, ("input_text", "output_text"), ("annotations", "logprobs"))


Content = Annotated[str, PlainValidator(_check_parts, json_schema_input_type=str | list[InputPart])]


class Item(RequestBody):
    """A part of the dialogue. Items of a response can be sent back unchanged."""

    type: Annotated[
        Literal["message", "function_call", "function_call_output"] | None,
        Field(description="Type of the item; `message` if absent."),
    ] = None
    role: Annotated[
        Literal["system", "developer", "user", "assistant"] | None, Field(description="Author of a message.")
    ] = None
    content: Annotated[Content | None, Field(description="Text of a message, or a list of parts.")] = None
    call_id: Annotated[str | None, Field(description="Id of a call, which its output repeats.")] = None
    name: Annotated[str | None, Field(description="Name of the function of a call.")] = None
    arguments: Annotated[Arguments | None, Field(description="Arguments of a call.")] = None
    output: Annotated[Content | None, Field(description="Output of a call, or a list of parts.")] = None
    id: Ignored[str] = None
    status: Ignored[str] = None
    phase: Ignored[str] = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        needed = FIELDS_OF_ITEMS[self.type]
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            if (getattr(self, name) is None) == (name in needed):
                text = "It is required." if name in needed else "It is not a field of items of this type."
                raise field_error("invalid_parameter", text, name)
        return self

    def in_chat(self) -> Message:
        """Return the message of a chat completion."""
        if self.type == "function_call":
            call = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
            return Message.model_validate({"role": "assistant", "tool_calls": [call]})
        if self.type == "function_call_output":
            return construct(Message, role="tool", content=self.output, tool_call_id=self.call_id)
        return construct(Message, role=self.role or "user", content=self.content)


class FunctionTool(FunctionDefinition):
    type: Annotated[Literal["function"], Field(description="Always `function`.")]

    def in_chat(self) -> ToolDefinition:
        function = construct(FunctionDefinition, **self.model_dump(exclude_unset=True, exclude={"type"}))
        return construct(ToolDefinition, type="function", function=function)


def _check_choice(value: Any) -> Any:
    """Return the choice of tools in the form of a chat completion."""
    if value in (None, "none", "auto", "required"):
        return value
    with suppress(ValidationError):
        tool = FunctionTool.model_validate(value)
        if tool.model_fields_set == {"type", "name"}:
            return tool.in_chat()
    text = 'It must be "none", "auto", "required" or {"type": "function", "name": "NAME"}.'
    raise field_error("unsupported_parameter", text)


class TextFormat(RequestBody):
    type: FormatType
    name: Ignored[str] = None
    description: Ignored[str] = None
    strict: Ignored[bool] = None
    json_schema: JsonSchema | None = Field(
        default=None, alias="schema", description="Schema of the type `json_schema`."
    )

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        constraint_of_type(self.type, self.json_schema, "schema")
        return self

    def written(self) -> dict[str, Any]:
        """Return the format as in a response."""
        schema = {} if self.json_schema is None else {"schema": orjson.loads(self.json_schema)}
        return {**self.model_dump(exclude={"json_schema"}, exclude_none=True), **schema}


class TextOptions(RequestBody):
    format: Annotated[TextFormat | None, Field(description="Format that the text must have.")] = None
    verbosity: Annotated[Any, must_equal("medium")] = None


class ResponsesBody(DecodingBody):
    inputs: Annotated[
        list[Annotated[Item, _of_type(*FIELDS_OF_ITEMS)]],
        BeforeValidator(
            lambda value: [{"role": "user", "content": check_text(value)}] if isinstance(value, str) else value,
            json_schema_input_type=str | list[Item],
        ),
        Field(alias="input", min_length=1, max_length=MAX_MESSAGES, description="Text of the user, or a dialogue."),
    ]
    instructions: Annotated[str | None, Field(description="System message before the dialogue.")] = None
    max_new_tokens: NumNewTokens | None = Field(
        default=None, alias="max_output_tokens", description=f"Maximum number of generated tokens. {DEFAULT_LENGTH}"
    )
    top_logprobs: TopLogprobs | None = Field(
        default=None, description=f"Number of top alternatives of each token; needs `{LOGPROBS}` in `include`."
    )
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None,
        Field(description=f"`{LOGPROBS}` returns the log-probability of each token."),
    ] = None
    text: Annotated[TextOptions | None, Field(description="Form of the text.")] = None
    tools: Annotated[
        list[Annotated[FunctionTool, _of_type("function"), AfterValidator(FunctionTool.in_chat)]] | None,
        Field(max_length=MAX_TOOLS, description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        Any,
        PlainValidator(_check_choice, json_schema_input_type=Literal["none", "auto", "required"] | FunctionTool),
        Field(description="`auto` lets the model choose, `required` makes it call tools, a function this one."),
    ] = None
    parallel_tool_calls: bool | None = Field(default=None, description="False: at most one call in a reply.")
    max_tool_calls: Ignored[int] = None
    metadata: Annotated[dict[str, str] | None, Field(description="Returned in the response.")] = None
    store: Annotated[bool | None, Field(description="Responses are never stored, whatever the value.")] = None
    previous_response_id: Annotated[Any, must_equal(None, NOT_STORED)] = None
    conversation: Annotated[Any, must_equal(None, NOT_STORED)] = None
    prompt: Annotated[Any, must_equal(None, NOT_STORED)] = None
    background: Annotated[Any, must_equal(False, "nothing is stored, so wait for the response")] = None
    reasoning: Annotated[Any, must_equal({"effort": "none"})] = None
    truncation: Annotated[Any, must_equal("disabled")] = None
    service_tier: Annotated[Any, must_equal("auto")] = None
    safety_identifier: Ignored[str] = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_retention: Ignored[str] = None
    # Fields of chat completions that have another name or no meaning here.
    max_tokens: Annotated[Any, must_equal(None, "send `max_output_tokens`")] = None
    constraint: Annotated[Any, must_equal(None, "send `text.format`")] = Field(default=None, alias="response_format")
    num_return_sequences: Annotated[Any, must_equal(1)] = Field(default=None, alias="n")
    stream_options: Annotated[Any, must_equal({"include_obfuscation": False})] = None

    EXAMPLES = (
        {"model": "smalltalk-chat-gatt", "input": "Hello!", "stream": True},
        {
            "instructions": "Always finish with sunshine.",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}],
            "max_output_tokens": 24,
        },
    )

    def in_chat(self) -> tuple[list[Message], list[int]]:
        """Return the messages of a chat completion, and the index of the first item of each."""
        messages, indices = list[Message](), list[int]()
        if (self.instructions or "").strip():
            messages, indices = [construct(Message, role="system", content=self.instructions)], [-1]
        for index, item in enumerate(self.inputs):
            message = item.in_chat()
            if message.tool_calls and messages and messages[-1].role == "assistant":  # parts of one reply
                calls = [*(messages[-1].tool_calls or ()), *message.tool_calls]
                messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
            else:
                messages.append(message)
                indices.append(index)
        return messages, indices

    @model_validator(mode="after")
    def _check_dialogue(self) -> Self:
        if self.inputs[-1].type == "function_call":
            text = "The outputs of the calls must follow, as items of the type function_call_output."
            raise field_error("invalid_parameter", text, "input", len(self.inputs) - 1)
        messages, indices = self.in_chat()
        tools: Any = self.tools  # in the form of a chat completion
        try:
            check_dialogue(messages)
            check_tool_choice(tools, self.tool_choice)
        except PydanticCustomError as error:
            field, *path = (error.context or {})["path"]
            if field == "messages":
                field, path = "input", [*map(indices.__getitem__, path[:1]), *path[1:]]
            path = [part for part in path if part != "function"]  # `tool_choice` has no such object
            raise field_error(error.type, error.message(), field, *path) from None
        if self.top_logprobs is not None and LOGPROBS not in (self.include or ()):
            raise field_error("invalid_parameter", f"top_logprobs needs {LOGPROBS} in include.", "top_logprobs")
        return self


class ModelResponse(TypedDict):
    """The reply, as items. It has more fields, which repeat those of the request."""

    id: Annotated[str, Field(description="Id of the response.")]
    object: Annotated[Literal["response"], Field(description="Type of the object.")]
    created_at: Annotated[int, Field(description="Time of the request, in seconds since 1970.")]
    model: Annotated[str, Field(description="Name of the model.")]
    status: Annotated[str, Field(description="`completed`, or `incomplete` at the maximum length.")]
    incomplete_details: Annotated[dict[str, str] | None, Field(description="`reason` for an incomplete reply.")]
    output: Annotated[list[dict[str, Any]], Field(description="Items of the types `message` and `function_call`.")]
    usage: Annotated[dict[str, Any], Field(description="Token counts.")]
