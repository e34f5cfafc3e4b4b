"""Requests and responses of OpenAI's completions and embeddings. In a request, null equals omitting the field."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from service.api.types import ModelName
from service.bundle import MAX_BEAMS
from service.fields import MAX_ID, MAX_INPUTS, NULL, RequestBody, TextOrTexts, TextsWithoutIds, case, only, refusal
from service.inference.results import Numbers
from service.parameters import (
    AT_MOST_ONE,
    BEAM_PARAMETERS,
    EarlyStopping,
    Encoding,
    GenerateParameters,
    LengthPenalty,
    MinNewTokens,
    NgramSize,
    NumBeams,
    NumNewTokens,
    RepetitionPenalty,
    Seed,
    Stop,
    TopLogprobs,
    TopP,
)


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(default=None, description="Send one more event, with the usage of all.")
    continuous_usage_stats: bool | None = Field(default=None, description="Have the usage so far in each event.")
    include_obfuscation: Annotated[Any, only(False)] = None


NOT_DRAWN: dict[str, Any] = {"maximum": 0}
WITHOUT_BEAMS = {name: {"enum": [getattr(GenerateParameters, name), None]} for name in BEAM_PARAMETERS}
NOT_TRUE: dict[str, Any] = {"enum": [False, None]}
# In JSON Schema, what fields say of each other.
TOGETHER: list[Any] = [
    {
        "anyOf": [
            case(temperature=NOT_DRAWN, num_beams=AT_MOST_ONE, n=AT_MOST_ONE, **WITHOUT_BEAMS),
            case(
                "temperature",
                temperature={"type": "number", "exclusiveMinimum": 0},
                num_beams=AT_MOST_ONE,
                **WITHOUT_BEAMS,
            ),
            case(
                "num_beams",
                temperature=NOT_DRAWN,
                num_beams={"type": "integer", "minimum": 2},
                n={"maximum": MAX_BEAMS},
                stream=NOT_TRUE,
            ),
        ]
    },
    {"anyOf": [case("temperature", temperature={"type": "number"}), case(top_p={"minimum": 1}, top_k={"maximum": 0})]},
    {"anyOf": [case("stream", stream={"const": True}), case(stream_options=NULL)]},
]


class DecodingBody(RequestBody):
    """What completions and chat completions have in common: how the text is chosen, and how it is sent."""

    model: ModelName = None
    max_tokens: NumNewTokens | None = Field(default=None, description="128, or the model's limit if that is less.")
    temperature: Annotated[float, Field(ge=0, le=10)] | None = Field(
        default=None, description="Above 0 each token is drawn; 0, the default, takes the likeliest."
    )
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = Field(default=None, description="-1 and 0 are off.")
    seed: Seed | None = Field(default=None, description="Choice i is drawn with seed + i.")
    n: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = Field(
        default=None, description="Texts for each prompt: samples, or the best of a beam search."
    )
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="Accepted for compatibility; ignored.")
    logit_bias: Annotated[Any, only({})] = None
    presence_penalty: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    # What OpenAI does not have.
    min_tokens: MinNewTokens | None = None
    ignore_eos: bool | None = Field(default=None, description="Never end before max_tokens.")
    num_beams: NumBeams | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: EarlyStopping | None = None
    repetition_penalty: RepetitionPenalty | None = None
    no_repeat_ngram_size: NgramSize | None = None

    @property
    def is_sampled(self) -> bool:
        return bool(self.temperature)

    @property
    def num_choices(self) -> int:
        """Texts for each prompt."""
        return self.n or 1

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def length(self) -> int | None:
        """Maximum number of new tokens."""
        return self.max_tokens

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        has_beams = (self.num_beams or 1) > 1
        if self.is_sampled and has_beams:
            raise refusal("invalid_parameter", "num_beams above 1 needs a temperature of 0.", "num_beams")
        for name, is_wanted in (("top_p", (self.top_p or 1) < 1), ("top_k", (self.top_k or 0) > 0)):
            if is_wanted and self.temperature is None:
                raise refusal("invalid_parameter", f"{name} needs a temperature, whose default is 0.", name)
        if self.num_choices > 1 and not (self.is_sampled or has_beams):
            raise refusal("invalid_parameter", "n above 1 needs a temperature above 0, or num_beams.", "n")
        num_texts = (self.num_choices if self.is_sampled else 1) * self.num_prompts
        if num_texts > MAX_INPUTS:
            message = f"These are {num_texts} texts; a call makes at most {MAX_INPUTS}."
            raise refusal("invalid_parameter", message, "n")
        if self.stream_options is not None and not self.stream:
            raise refusal("invalid_parameter", "stream_options needs stream: true.", "stream_options")
        return self


class CompletionBody(DecodingBody):
    prompt: TextsWithoutIds
    best_of: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = Field(default=None, description="n and nothing else.")
    logprobs: TopLogprobs | None = None
    echo: bool | None = Field(default=None, description="Only of a model that goes on with its prompt.")
    suffix: Annotated[Any, only("")] = None
    target_prefix: TextOrTexts | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "A man is riding a bicycle."},
                {"prompt": ["A dog runs.", "A man sleeps."], "max_tokens": 16, "temperature": 0.8, "seed": 7, "n": 2},
                {"prompt": "A dog runs.", "num_beams": 4, "n": 2, "length_penalty": 0.6, "logprobs": 2},
                {"prompt": "A dog runs.", "stream": True, "stream_options": {"include_usage": True}},
                {"prompt": "A dog runs.", "max_tokens": 8, "ignore_eos": True, "stop": None, "user": "somebody"},
            ],
            "allOf": [*TOGETHER, {"anyOf": [case(echo=NOT_TRUE), case(logprobs=NULL)]}],
        }
    )

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @model_validator(mode="after")
    def _fits_its_prompt(self) -> Self:
        if self.best_of not in (None, self.num_choices):
            raise refusal("unsupported_parameter", "best_of can only be n; num_beams searches for more.", "best_of")
        if self.echo and self.logprobs is not None:
            message = "What is echoed has no log-probabilities: leave out echo, or logprobs."
            raise refusal("unsupported_parameter", message, "logprobs")
        return self


class EmbeddingBody(RequestBody):
    model: ModelName = None
    input: TextsWithoutIds
    encoding_format: Encoding | None = None
    dimensions: int | None = Field(default=None, ge=1, le=MAX_ID, description="Those of the model and no others.")
    user: str | None = Field(default=None, description="Accepted for compatibility; ignored.")

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": ["A dog runs.", "A cat sleeps."], "encoding_format": "base64"}]}
    )


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[Literal["stop", "length"] | None, Field(description="Null while a stream continues.")]


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(TypedDict):
    """The completed texts; each event of a stream is one of these with the new text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[CompletionUsage | None]


@dataclass(frozen=True)
class Embedding:
    object: Literal["embedding"]
    index: int
    embedding: Numbers


@dataclass(frozen=True)
class EmbeddingUsage:
    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class EmbeddingList:
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


def parameters_of(body: DecodingBody, end_id: int, *, top_logprobs: int, **others: Any) -> GenerateParameters:
    """Map the decoding fields of a body.

    Args:
        body: the body.
        end_id: the model's end token.
        top_logprobs: alternatives of each token.
        others: further parameters.
    """
    # A fixed length needs no look at all scores of every step, unlike a token that is suppressed.
    is_fixed = body.ignore_eos and body.length is not None
    parameters: dict[str, Any] = {
        "max_new_tokens": body.length,
        "min_new_tokens": body.length if is_fixed else body.min_tokens,
        "stop": body.stop,
        "num_beams": body.num_beams,
        "num_return_sequences": body.num_choices,
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "repetition_penalty": body.repetition_penalty,
        "no_repeat_ngram_size": body.no_repeat_ngram_size,
        "suppress_tokens": (end_id,) if body.ignore_eos and not is_fixed else None,
        "top_logprobs": top_logprobs,
    }
    if body.is_sampled:  # without sampling they would change nothing
        parameters |= {
            "do_sample": True,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": max(0, body.top_k or 0),
            "seed": body.seed,
        }
    return GenerateParameters(**{name: value for name, value in (parameters | others).items() if value is not None})
