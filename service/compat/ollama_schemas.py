"""Requests and responses of Ollama's API. In a request, null equals omitting the field."""

from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from typing_extensions import TypedDict

from sightline.service import parameters
from sightline.service.api.messages import DIALOGUE, MAX_MESSAGES, Message, check_dialogue
from sightline.service.api.tools import ToolDefinitions
from sightline.service.body_fields import (
    NOT_BLANK,
    NULL,
    TEXT_SCHEMA,
    RequestBody,
    Texts,
    check_texts_without_ids,
    construct,
    field_error,
    list_schema,
    must_equal,
)
from sightline.service.compat.common import Dimensions, Ignored
from sightline.service.constraints import ANY_OBJECT, Constraint, check_schema
from sightline.service.inference.results import Numbers

Capability = Literal["completion", "tools", "embedding"]
RequiredModel = Annotated[
    str, Field(min_length=1, max_length=128, description="Name of the model; the tag `:latest` may follow it.")
]


class DecodingOptions(RequestBody):
    """Options of a generation. Those that are absent have the defaults of the model."""

    max_new_tokens: Annotated[int, Field(ge=-2, le=parameters.MAX_TOKENS)] | None = Field(
        default=None,
        alias="num_predict",
        description="Maximum number of generated tokens. The default is that of the model; without one, and with 0, -1 "
        "and -2, it is as many as the model can generate.",
    )
    temperature: Annotated[float, Field(ge=0, le=parameters.MAX_TEMPERATURE)] | None = Field(
        default=None,
        description="Values above 0 sample each token, and 0 takes the most probable one. The default is 0, unless the "
        "model samples by default, or `top_k`, `top_p`, `min_p` or `typical_p` need samples.",
    )
    top_k: parameters.TopK | None = None
    top_p: parameters.TopP | None = None
    min_p: parameters.MinP | None = None
    typical_p: parameters.TypicalP | None = None
    seed: Annotated[parameters.Seed | None, Field(description="Seed of the sampling; random if absent.")] = None
    stop: parameters.Stop | None = None
    repetition_penalty: parameters.RepetitionPenalty | None = Field(default=None, alias="repeat_penalty")
    repeat_last_n: Annotated[Any, must_equal(-1)] = None
    presence_penalty: parameters.PresencePenalty | None = None
    frequency_penalty: parameters.FrequencyPenalty | None = None
    tfs_z: Annotated[Any, must_equal(1)] = None
    mirostat: Annotated[Any, must_equal(0)] = None
    mirostat_tau: Ignored[float] = None
    mirostat_eta: Ignored[float] = None
    penalize_newline: Ignored[bool] = None
    num_keep: Ignored[int] = None
    num_ctx: int | None = Field(
        default=None, description="Accepted for compatibility; ignored. The limits of the model apply."
    )
    num_batch: Ignored[int] = None
    num_gpu: Ignored[int] = None
    main_gpu: Ignored[int] = None
    num_thread: Ignored[int] = None
    numa: Ignored[bool] = None
    low_vram: Ignored[bool] = None
    f16_kv: Ignored[bool] = None
    logits_all: Ignored[bool] = None
    vocab_only: Ignored[bool] = None
    use_mmap: Ignored[bool] = None
    use_mlock: Ignored[bool] = None
    embedding_only: Ignored[bool] = None


def _check_format(value: Any) -> Constraint | None:
    if isinstance(value, str | None):
        if value not in (None, "", "json"):
            raise field_error("invalid_parameter", 'It must be "json" or a JSON Schema.')
        return ANY_OBJECT if value else None
    return construct(Constraint, json_schema=check_schema(value))


_FORMAT: dict[str, Any] = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, NULL]}


class OllamaBody(RequestBody):
    """Fields that both text endpoints share."""

    model: RequiredModel
    stream: bool | None = Field(default=None, description="Send JSON lines as the text is generated; the default.")
    options: DecodingOptions | None = Field(default=None, description="Generation parameters.")
    logprobs: bool | None = Field(default=None, description="Return the log-probability of each token.")
    top_logprobs: parameters.TopLogprobs | None = Field(
        default=None, description="Number of top alternatives returned for each token; needs `logprobs: true`."
    )
    keep_alive: Ignored[float | str] = None
    constraint: Annotated[Constraint | None, PlainValidator(_check_format), WithJsonSchema(_FORMAT)] = Field(
        default=None, alias="format", description="Format of the text: `json`, any JSON object, or a JSON Schema."
    )
    think: Annotated[Any, must_equal(False)] = None
    truncate: Ignored[bool] = None
    shift: Ignored[bool] = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise field_error("invalid_parameter", "top_logprobs needs logprobs: true.", "top_logprobs")
        return self


class PromptBody(OllamaBody):
    inputs: str | None = Field(
        default=None,
        alias="prompt",
        description="Prompt; without one, or with an empty one, the model is only loaded.",
        json_schema_extra={"pattern": f"^$|{NOT_BLANK}"},
    )
    system: str | None = Field(default=None, description="System message; only for models with a chat template.")
    raw: bool | None = Field(default=None, description="Do not apply the model's chat template to the prompt.")
    suffix: Annotated[Any, must_equal("")] = None
    template: Annotated[Any, must_equal("")] = None
    context: Annotated[Any, must_equal([])] = None
    images: Annotated[Any, must_equal([])] = None

    EXAMPLES = (
        {"model": "multi30k-en-de", "prompt": "A man is riding a bicycle.", "stream": False},
        {
            "model": "multi30k-en-de",
            "prompt": "A dog runs.",
            "options": {"temperature": 0.8, "top_k": 40, "seed": 7, "num_predict": 16},
        },
    )


class DialogueMessage(Message):
    """A message of a dialogue; Ollama has fields of its own."""

    images: Annotated[Any, must_equal([])] = None
    thinking: Annotated[Any, must_equal("")] = None
    tool_name: Annotated[str, Field(max_length=128, description="Name of the tool that has this result.")] | None = None

    @property
    def author(self) -> str | None:
        return self.tool_name or self.name


class DialogueBody(OllamaBody):
    inputs: Annotated[list[DialogueMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        default=None, alias="messages", description=f"{DIALOGUE} Without messages, the model is only loaded."
    )
    tools: ToolDefinitions | None = Field(default=None, description="Functions that the model may call.")

    EXAMPLES = ({"model": "smalltalk-chat-gatt", "messages": [{"role": "user", "content": "Hello!"}], "stream": False},)

    @model_validator(mode="after")
    def _check_dialogue(self) -> Self:
        if self.inputs:
            check_dialogue(self.inputs)
        return self


_EMPTY_OR_TEXT = {"type": "string", "pattern": f"^$|{NOT_BLANK}"}
_EMBEDDED = {"anyOf": [_EMPTY_OR_TEXT, {**list_schema(TEXT_SCHEMA), "minItems": 0}, NULL]}


def _check_embedded(value: Any) -> Texts | None:
    """Check texts to encode; there are none in an empty text or list."""
    return None if value in (None, "", []) else check_texts_without_ids(value)


class OllamaEmbedBody(RequestBody):
    model: RequiredModel
    inputs: Annotated[Texts | None, PlainValidator(_check_embedded), WithJsonSchema(_EMBEDDED)] = Field(
        default=None, alias="input", description="Text or texts to encode; without any, the model is only loaded."
    )
    truncate: bool | None = Field(
        default=None, description="Cut inputs that are too long instead of rejecting them; the default is true."
    )
    dimensions: Dimensions = None
    options: Ignored[DecodingOptions] = None
    keep_alive: Ignored[float | str] = None

    EXAMPLES = (
        {"model": "multi30k-en-de", "input": ["A dog runs.", "A cat sleeps."]},
        {"model": "multi30k-en-de", "input": "A dog runs.", "truncate": False},
    )


class OllamaEmbeddingBody(RequestBody):
    model: RequiredModel
    inputs: str | None = Field(
        default=None,
        alias="prompt",
        description="Text to encode; without one, the model is only loaded.",
        json_schema_extra={"pattern": f"^$|{NOT_BLANK}"},
    )
    options: Ignored[DecodingOptions] = None
    keep_alive: Ignored[float | str] = None

    EXAMPLES = ({"model": "multi30k-en-de", "prompt": "A dog runs."},)


class ShowBody(RequestBody):
    """Name of a model. Ollama's own client sends all fields, most of them empty."""

    model: Annotated[str, Field(max_length=128)] | None = Field(
        default=None, description="Name of the model; the tag `:latest` may follow it."
    )
    name: Annotated[str, Field(max_length=128)] | None = Field(default=None, description="Older name of `model`.")
    verbose: Ignored[bool] = None
    system: Annotated[Any, must_equal("")] = None
    template: Annotated[Any, must_equal("")] = None
    options: Ignored[DecodingOptions] = None

    EXAMPLES = ({"model": "multi30k-en-de"},)

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if not (self.model or self.name):
            raise field_error("invalid_parameter", "It is required.", "model")
        return self


# Responses. The times of one call are in nanoseconds.

Nanoseconds = Annotated[int, Field(ge=0)]


class TokenLogprob(TypedDict):
    token: Annotated[str, Field(description="Text of the token.")]
    logprob: Annotated[float, Field(description="Natural logarithm of its probability.")]


class Logprob(TokenLogprob):
    top_logprobs: NotRequired[
        Annotated[list[TokenLogprob], Field(description="Top alternatives at this position, best first.")]
    ]


class Part(TypedDict):
    """A part of a text: the whole text, or the new text of a line of a stream.

    The fields from `done_reason` on are in the whole text and in the last line.
    """

    model: Annotated[str, Field(description="Name of the model.")]
    created_at: Annotated[str, Field(description="Time of this part, as in RFC 3339.")]
    done: Annotated[bool, Field(description="True if nothing follows.")]
    logprobs: NotRequired[Annotated[list[Logprob], Field(description="Tokens of this part; only if requested.")]]
    done_reason: NotRequired[
        Annotated[
            Literal["stop", "length", "load"],
            Field(description="Reason for the end: `stop`, `length`, or `load` if there was no prompt."),
        ]
    ]
    total_duration: NotRequired[Annotated[Nanoseconds, Field(description="Duration of the call in nanoseconds.")]]
    load_duration: NotRequired[Annotated[Nanoseconds, Field(description="Always 0.")]]
    prompt_eval_count: NotRequired[Annotated[int, Field(description="Tokens of the prompt, cached ones included.")]]
    prompt_eval_duration: NotRequired[
        Annotated[Nanoseconds, Field(description="Time to encode the prompt in nanoseconds.")]
    ]
    eval_count: NotRequired[Annotated[int, Field(description="Generated tokens.")]]
    eval_duration: NotRequired[Annotated[Nanoseconds, Field(description="Time to generate them in nanoseconds.")]]


class GeneratedPart(Part):
    response: Annotated[str, Field(description="Generated text, or its new part.")]


class OllamaFunction(TypedDict):
    name: Annotated[str, Field(description="Name of the function.")]
    arguments: Annotated[dict[str, Any], Field(description="Arguments.")]


class OllamaCall(TypedDict):
    function: Annotated[OllamaFunction, Field(description="The function.")]


class OllamaMessage(TypedDict):
    role: Annotated[Literal["assistant"], Field(description="Always `assistant`.")]
    content: Annotated[str, Field(description="Generated text, or its new part.")]
    tool_calls: NotRequired[Annotated[list[OllamaCall], Field(description="Calls of tools; absent without any.")]]


class DialoguePart(Part):
    message: Annotated[OllamaMessage, Field(description="Reply to the last message.")]


class Embeddings(TypedDict):
    model: Annotated[str, Field(description="Name of the model.")]
    embeddings: Annotated[list[Numbers], Field(description="One vector of length 1 for each input, in order.")]
    total_duration: Annotated[Nanoseconds, Field(description="Duration of the call in nanoseconds.")]
    load_duration: Annotated[Nanoseconds, Field(description="Always 0.")]
    prompt_eval_count: Annotated[int, Field(description="Tokens of the inputs.")]


class OneEmbedding(TypedDict):
    embedding: Annotated[Numbers, Field(description="Vector of the text; empty without a text.")]


class Details(TypedDict):
    parent_model: Annotated[str, Field(description="Always empty.")]
    format: Annotated[Literal["onnx"], Field(description="Always `onnx`.")]
    family: Annotated[str, Field(description="Architecture of the model.")]
    families: Annotated[list[str], Field(description="The family alone.")]
    parameter_size: Annotated[str, Field(description="Number of weights, such as `4.9M`.")]
    quantization_level: Annotated[str, Field(description="Data type of the weights.")]


class Tag(TypedDict):
    name: Annotated[str, Field(description="Name of the model.")]
    model: Annotated[str, Field(description="Name of the model.")]
    modified_at: Annotated[str, Field(description="Time of the export, as in RFC 3339.")]
    size: Annotated[int, Field(description="Size of the bundle's files in bytes.")]
    digest: Annotated[str, Field(description="SHA-256 of the bundle's files.")]
    details: Annotated[Details, Field(description="Properties of the model.")]


class Tags(TypedDict):
    models: Annotated[list[Tag], Field(description="Served models, sorted by name.")]


class LoadedTag(Tag):
    expires_at: Annotated[str, Field(description="Always the last second of the year 9999: a model stays loaded.")]
    size_vram: Annotated[int, Field(description="Size in the memory of a GPU: `size` or 0.")]
    context_length: Annotated[int, Field(description="Maximum number of tokens of an input.")]


class LoadedTags(TypedDict):
    models: Annotated[list[LoadedTag], Field(description="Models in memory, sorted by name.")]


class Shown(TypedDict):
    license: Annotated[str, Field(description="License of the weights.")]
    modelfile: Annotated[str, Field(description="Always empty: models are bundles.")]
    parameters: Annotated[str, Field(description="Defaults of the options that the model sets, one on each line.")]
    template: Annotated[str, Field(description="Chat template, with `{}` for messages; empty if there is none.")]
    details: Annotated[Details, Field(description="Properties of the model.")]
    model_info: Annotated[dict[str, Any], Field(description="Sizes and limits of the model.")]
    capabilities: Annotated[
        list[Capability],
        Field(description="`completion` for text, `tools` if the chat template takes tools, `embedding` for vectors."),
    ]
    modified_at: Annotated[str, Field(description="Time of the export, as in RFC 3339.")]


class Version(TypedDict):
    version: Annotated[str, Field(description="Version of the service.")]
