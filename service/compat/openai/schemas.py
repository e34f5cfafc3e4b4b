"""Bodies of OpenAI's completions and embeddings; null in a request omits the field."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypedDict

from sightline.service import parameters
from sightline.service.api.types import ModelName, Truncate
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import (
    MAX_INPUTS,
    RequestBody,
    TextOrTexts,
    TextsOrIds,
    TextsWithoutIds,
    construct,
    field_error,
    must_equal,
)
from sightline.service.compat.common import Dimensions, Ignored, parameters_by_temperature
from sightline.service.constraints import ANY_OBJECT, Constraint, JsonSchema
from sightline.service.inference.call import Call
from sightline.service.inference.generate import GenerateWarning
from sightline.service.inference.results import Numbers
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import GenerateParameters, given_parameters
from sightline.service.tasks.rerank import EncoderUsage


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(
        default=None, description="Send one more event with the usage of the whole call."
    )
    continuous_usage_stats: bool | None = Field(default=None, description="Include the usage so far in each event.")
    include_obfuscation: Annotated[Any, must_equal(False)] = None


class NamedSchema(RequestBody):
    name: Ignored[str] = None
    description: Ignored[str] = None
    json_schema: Annotated[JsonSchema, Field(alias="schema", description="JSON Schema that the text must match.")]
    strict: Ignored[bool] = None


FormatType = Annotated[
    Literal["text", "json_object", "json_schema"],
    Field(description="`json_object` is any JSON object, and `json_schema` a text that matches the schema."),
]


class ResponseFormat(RequestBody):
    type: FormatType
    json_schema: Annotated[NamedSchema | None, Field(description="Schema of the type `json_schema`.")] = None


def constraint_of(format_: ResponseFormat) -> Constraint | None:
    schema = None if format_.json_schema is None else format_.json_schema.json_schema
    return constraint_of_type(format_.type, schema, "json_schema")


def constraint_of_type(type_: FormatType, schema: str | None, field: str) -> Constraint | None:
    """Return the constraint of a format, whose schema is in the field `field`."""
    if (type_ == "json_schema") != (schema is not None):
        message = "It is required by the type json_schema, and not allowed with another one."
        raise field_error("invalid_parameter", message, field)
    if schema is not None:
        return construct(Constraint, json_schema=schema)
    return ANY_OBJECT if type_ == "json_object" else None


class DecodingBody(RequestBody):
    """Fields that completions and chat completions share: decoding and streaming."""

    model: ModelName = None
    max_new_tokens: parameters.NumNewTokens | None = Field(
        default=None, alias="max_tokens", description=f"Maximum number of generated tokens. {parameters.DEFAULT_LENGTH}"
    )
    temperature: Annotated[float, Field(ge=0, le=parameters.MAX_TEMPERATURE)] | None = Field(
        default=None,
        description="Values above 0 sample each token, and 0 takes the most probable one. The default is 0, unless the "
        "model samples by default, or `top_p`, `top_k` or `n` need samples.",
    )
    top_p: parameters.TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=parameters.MAX_TOP_K), AfterValidator(lambda count: max(0, count))] | None = (
        Field(default=None, description="Sample from this many of the most probable tokens; -1 and 0 disable it.")
    )
    seed: parameters.Seed | None = Field(default=None, description="Seed of the sampling; choice i uses seed + i.")
    num_return_sequences: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = Field(
        default=None, alias="n", description="Number of texts for each prompt: samples, or the best of a beam search."
    )
    stop: parameters.Stop | None = None
    stream: Annotated[bool | None, Field(description="Send server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Field(description="Options of a stream.")] = None
    constraint: Annotated[ResponseFormat, AfterValidator(constraint_of)] | None = Field(
        default=None, alias="response_format", description="Format that the text must have."
    )
    user: Ignored[str] = None
    logit_bias: parameters.LogitBias | None = None
    presence_penalty: parameters.PresencePenalty | None = None
    frequency_penalty: parameters.FrequencyPenalty | None = None
    # Extensions to OpenAI's API.
    min_new_tokens: parameters.MinNewTokens | None = Field(default=None, alias="min_tokens")
    ignore_eos: bool | None = Field(default=None, description="Generate until `max_tokens`, ignoring the end token.")
    num_beams: parameters.NumBeams | None = None
    length_penalty: parameters.LengthPenalty | None = None
    early_stopping: parameters.EarlyStopping | None = None
    repetition_penalty: parameters.RepetitionPenalty | None = None
    no_repeat_ngram_size: parameters.NgramSize | None = None

    @property
    def num_choices(self) -> int:
        """Texts for each prompt."""
        return self.num_return_sequences or 1

    @property
    def length(self) -> int | None:
        """Maximum number of new tokens."""
        return self.max_new_tokens

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        has_beams = (self.num_beams or 1) > 1
        if self.temperature and has_beams:
            raise field_error("invalid_parameter", "num_beams above 1 needs a temperature of 0.", "num_beams")
        for name in ("top_p", "top_k") if has_beams and self.temperature is None else ():
            if (getattr(self, name) or getattr(parameters.NEUTRAL, name)) != getattr(parameters.NEUTRAL, name):
                message = f"{name} has no effect with num_beams above 1; leave out one of them."
                raise field_error("invalid_parameter", message, name)
        if self.stream_options is not None and not self.stream:
            raise field_error("invalid_parameter", "stream_options needs stream: true.", "stream_options")
        return self


class CompletionBody(DecodingBody):
    inputs: Annotated[
        TextsOrIds, Field(alias="prompt", description="Text to complete or its token ids, or a list of texts or ids.")
    ]
    best_of: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = Field(
        default=None, description="Only the value of `n` is supported."
    )
    top_logprobs: parameters.TopLogprobs | None = Field(default=None, alias="logprobs")
    echo: bool | None = Field(
        default=None, description="Return the prompt before the text; only for decoder-only models."
    )
    suffix: Annotated[Any, must_equal("")] = None
    target_prefix: Annotated[
        TextOrTexts | None, Field(description="Beginning of the text: one string for all prompts, or one for each.")
    ] = None

    EXAMPLES = (
        {"prompt": "A man is riding a bicycle."},
        {"prompt": ["A dog runs.", "A man sleeps."], "max_tokens": 16, "temperature": 0.8, "seed": 7, "n": 2},
        {"prompt": "A dog runs.", "num_beams": 4, "n": 2, "length_penalty": 0.6, "logprobs": 2},
        {"prompt": "A dog runs.", "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "A dog runs.", "max_tokens": 8, "ignore_eos": True, "stop": None, "user": "somebody"},
    )

    @model_validator(mode="after")
    def _check_prompt_options(self) -> Self:
        if self.best_of not in (None, self.num_choices):
            raise field_error(
                "unsupported_parameter",
                f"best_of must equal n ({self.num_choices}), got {self.best_of}; use num_beams for beam search.",
                "best_of",
            )
        if self.echo and self.top_logprobs is not None:
            message = "logprobs cannot be combined with echo: a prompt has no log-probabilities."
            raise field_error("unsupported_parameter", message, "logprobs")
        return self


class EmbeddingBody(RequestBody):
    model: ModelName = None
    inputs: Annotated[TextsWithoutIds, Field(alias="input", description="Text to encode, or a list of texts.")]
    encoding_format: Annotated[
        parameters.Encoding | None,
        Field(description="Encoding of the vectors: numbers, or base64 of little-endian float32."),
    ] = None
    dimensions: Dimensions = None
    user: Ignored[str] = None
    truncate: Truncate | None = None  # an extension to OpenAI's API, which rejects texts that are too long

    EXAMPLES = ({"input": ["A dog runs.", "A cat sleeps."], "encoding_format": "base64"},)


class CompletionLogprobs(TypedDict):
    tokens: Annotated[list[str], Field(description="Text of each token.")]
    token_logprobs: Annotated[list[float], Field(description="Log-probability of each token.")]
    top_logprobs: Annotated[
        list[dict[str, float]],
        Field(
            description="Log-probabilities of the token and its top alternatives by their texts. A token whose text "
            "another one before it has, such as a byte of a character, has the name `token_id:` and its id instead."
        ),
    ]
    text_offset: Annotated[list[int], Field(description="Index of each token's first character in the text.")]


class CompletionChoice(TypedDict):
    index: Annotated[int, Field(description="Index among the choices of all prompts.")]
    text: Annotated[str, Field(description="Generated text.")]
    logprobs: Annotated[CompletionLogprobs | None, Field(description="Log-probabilities; null unless requested.")]
    finish_reason: Annotated[
        Literal["stop", "length"] | None,
        Field(description="Reason for the end: `stop` or `length`; null while a stream continues."),
    ]


class PromptTokensDetails(TypedDict):
    cached_tokens: Annotated[int, Field(description="Tokens of the prompts whose states came from the prefix cache.")]


class CompletionUsage(TypedDict):
    prompt_tokens: Annotated[int, Field(description="Tokens of the prompts.")]
    completion_tokens: Annotated[int, Field(description="Generated tokens.")]
    total_tokens: Annotated[int, Field(description="Sum of both.")]
    prompt_tokens_details: NotRequired[
        Annotated[
            PromptTokensDetails, Field(description="Parts of `prompt_tokens`; only of decoder-only models, at the end.")
        ]
    ]


class Completion(TypedDict):
    """The completed texts; each event of a stream is one of these with the new text."""

    id: Annotated[str, Field(description="Id of the response.")]
    object: Annotated[Literal["text_completion"], Field(description="Type of the object.")]
    created: Annotated[int, Field(description="Time of the request, in seconds since 1970.")]
    model: Annotated[str, Field(description="Name of the model.")]
    choices: Annotated[list[CompletionChoice], Field(description="Generated texts.")]
    usage: NotRequired[Annotated[CompletionUsage | None, Field(description="Token counts.")]]
    warnings: NotRequired[
        Annotated[list[GenerateWarning], Field(description="Reasons to doubt texts; absent if there are none.")]
    ]


@dataclass(frozen=True)
class Embedding:
    object: Annotated[Literal["embedding"], Field(description="Type of the object.")]
    index: Annotated[int, Field(description="Index of the input.")]
    embedding: Annotated[Numbers, Field(description="The vector.")]


@dataclass(frozen=True)
class EmbeddingList:
    object: Annotated[Literal["list"], Field(description="Type of the object.")]
    model: Annotated[str, Field(description="Name of the model.")]
    data: Annotated[list[Embedding], Field(description="One vector for each input, in order.")]
    usage: Annotated[EncoderUsage, Field(description="Token counts.")]


def decoding_parameters(call: Call, body: DecodingBody, model: ServedModel) -> GenerateParameters:
    """Return the parameters of a body; the model's defaults are used for those that are absent."""
    sampling = {"sampling": "a temperature above 0", "no_sampling": "a temperature of 0"}
    call.field_names = {**call.field_names, **sampling}
    requested = given_parameters(body)
    if body.length is not None:
        requested["max_new_tokens"] = body.length
    if body.ignore_eos and body.length is not None:
        requested["min_new_tokens"] = body.length  # the last token may be an end token
    elif body.ignore_eos:
        requested["suppress_tokens"] = model.manifest.tokens.end_ids
    parameters = parameters_by_temperature(model, requested, body.temperature, stream=bool(body.stream))
    if body.num_choices > 1 and not parameters.do_sample and parameters.num_beams == 1:
        raise ApiError("invalid_parameter", "n above 1 needs a temperature above 0, or num_beams.", path="n")
    return parameters
