"""Requests and responses of OpenAI's chat completions; null in a request omits the field."""

from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from sightline.service.api.messages import Messages, check_dialogue
from sightline.service.api.tools import ToolChoice, ToolDefinitions, check_tool_choice
from sightline.service.body_fields import field_error, must_equal
from sightline.service.compat.common import Ignored
from sightline.service.compat.openai.schemas import CompletionUsage, DecodingBody
from sightline.service.parameters import NumNewTokens, TopLogprobs


class ChatBody(DecodingBody):
    inputs: Annotated[Messages, Field(alias="messages")]
    max_completion_tokens: NumNewTokens | None = Field(default=None, description="Newer name of `max_tokens`.")
    logprobs: Annotated[bool | None, Field(description="Return the log-probability of each token.")] = None
    top_logprobs: TopLogprobs | None = Field(
        default=None, description="Number of top alternatives returned for each token; needs `logprobs: true`."
    )
    modalities: Annotated[Any, must_equal(["text"])] = None
    tools: ToolDefinitions | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(
        default=None, description="`auto`; `required` or a function if the model must call one; or `none`."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False: at most one call in a reply.")
    functions: Annotated[Any, must_equal([], "send `tools`")] = None
    function_call: Annotated[Any, must_equal("none", "send `tool_choice`")] = None
    store: Annotated[Any, must_equal(False)] = None
    metadata: Ignored[dict[str, str]] = None
    service_tier: Annotated[Any, must_equal("auto")] = None
    safety_identifier: Ignored[str] = None
    prompt_cache_key: Ignored[str] = None
    prediction: Annotated[Any, must_equal({})] = None
    audio: Annotated[Any, must_equal({})] = None
    web_search_options: Annotated[Any, must_equal({})] = None
    reasoning_effort: Annotated[Any, must_equal("none")] = None
    verbosity: Annotated[Any, must_equal("medium")] = None

    EXAMPLES = (
        {"model": "smalltalk-chat-gatt", "messages": [{"role": "user", "content": "Hello!"}]},
        {
            "messages": [
                {"role": "system", "content": "Always finish with sunshine."},
                {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
                {"role": "assistant", "content": "Hello, sunshine."},
                {"role": "user", "content": "How are you?"},
            ],
            "max_completion_tokens": 24,
            "logprobs": True,
            "top_logprobs": 2,
        },
        {"messages": [{"role": "user", "content": "Hello!"}], "stream": True},
    )

    @property
    def length(self) -> int | None:
        return self.max_new_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        check_dialogue(self.inputs)
        check_tool_choice(self.tools, self.tool_choice)
        if self.max_new_tokens is not None and self.max_completion_tokens not in (None, self.max_new_tokens):
            message = "max_tokens and max_completion_tokens are the same parameter; send only one of them."
            raise field_error("invalid_parameter", message, "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("invalid_parameter", "top_logprobs needs logprobs: true.", "top_logprobs")
        return self


class ChatToken(TypedDict):
    token: Annotated[str, Field(description="Text of the token.")]
    logprob: Annotated[float, Field(description="Natural logarithm of its probability.")]
    bytes: Annotated[list[int] | None, Field(description="UTF-8 bytes of the token; null for the end token.")]


class ChosenToken(ChatToken):
    top_logprobs: Annotated[list[ChatToken], Field(description="Top alternatives at this position, best first.")]


class ChatLogprobs(TypedDict):
    content: Annotated[list[ChosenToken], Field(description="Generated tokens.")]
    refusal: Annotated[None, Field(description="Always null.")]


class ReplyFunction(TypedDict):
    name: Annotated[str, Field(description="Name of the function.")]
    arguments: Annotated[str, Field(description="JSON object of the arguments, as text.")]


class ReplyCall(TypedDict):
    id: Annotated[str, Field(description="Id, which the message with the result repeats.")]
    type: Annotated[Literal["function"], Field(description="Always `function`.")]
    function: Annotated[ReplyFunction, Field(description="The function.")]


class AssistantMessage(TypedDict):
    role: Annotated[Literal["assistant"], Field(description="Always `assistant`.")]
    content: Annotated[str | None, Field(description="Generated text; null if there are only calls.")]
    refusal: Annotated[None, Field(description="Always null.")]
    tool_calls: NotRequired[Annotated[list[ReplyCall], Field(description="Calls of tools; absent without any.")]]


class ChatChoice(TypedDict):
    index: Annotated[int, Field(description="Index of the choice.")]
    message: Annotated[AssistantMessage, Field(description="Generated message.")]
    logprobs: Annotated[ChatLogprobs | None, Field(description="Log-probabilities; null unless requested.")]
    finish_reason: Annotated[
        Literal["stop", "length", "tool_calls"],
        Field(description="Reason for the end: `stop`, `length`, or `tool_calls` if the message has calls."),
    ]


class ChatCompletion(TypedDict):
    """The generated messages.

    Events of a stream have the same fields, but `object` ends with `.chunk`, and `delta` instead of
    `message` has the new text.
    """

    id: Annotated[str, Field(description="Id of the response.")]
    object: Annotated[Literal["chat.completion"], Field(description="Type of the object.")]
    created: Annotated[int, Field(description="Time of the request, in seconds since 1970.")]
    model: Annotated[str, Field(description="Name of the model.")]
    choices: Annotated[list[ChatChoice], Field(description="Generated messages.")]
    usage: Annotated[CompletionUsage, Field(description="Token counts.")]
