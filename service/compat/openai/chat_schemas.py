"""Requests and responses of OpenAI's chat completions; null in a request omits the field."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from sightline.service.api.messages import Messages, check_dialogue
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
    tools: Annotated[Any, must_equal([])] = None
    tool_choice: Annotated[Any, must_equal("none")] = None
    parallel_tool_calls: Ignored[bool] = None
    functions: Annotated[Any, must_equal([])] = None
    function_call: Annotated[Any, must_equal("none")] = None
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

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
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
            ],
        }
    )

    @property
    def length(self) -> int | None:
        return self.max_new_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _check_dialogue(self) -> Self:
        check_dialogue(self.inputs)
        return self

    @model_validator(mode="after")
    def _check_response_options(self) -> Self:
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


class AssistantMessage(TypedDict):
    role: Annotated[Literal["assistant"], Field(description="Always `assistant`.")]
    content: Annotated[str, Field(description="Generated text.")]
    refusal: Annotated[None, Field(description="Always null.")]


class ChatChoice(TypedDict):
    index: Annotated[int, Field(description="Index of the choice.")]
    message: Annotated[AssistantMessage, Field(description="Generated message.")]
    logprobs: Annotated[ChatLogprobs | None, Field(description="Log-probabilities; null unless requested.")]
    finish_reason: Annotated[Literal["stop", "length"], Field(description="Reason for the end: `stop` or `length`.")]


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
