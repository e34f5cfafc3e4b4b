"""Requests and responses of Text Generation Inference; null in a request omits the field."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from sightline.service.body_fields import RequestBody, Text, must_equal
from sightline.service.parameters import (
    DEFAULT_LENGTH,
    FrequencyPenalty,
    Language,
    NumNewTokens,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    TypicalP,
)


class TextGenerationParameters(RequestBody):
    max_new_tokens: NumNewTokens | None = Field(
        default=None, description=f"Maximum number of generated tokens. {DEFAULT_LENGTH}"
    )
    do_sample: bool | None = Field(
        default=None,
        description="Sample each token; implied by top_k, a temperature other than 1, or a top_p or typical_p below 1.",
    )
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    typical_p: TypicalP | None = None
    seed: Annotated[Seed | None, Field(description="Seed of the sampling; random if absent.")] = None
    stop: Stop | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    source_language: Annotated[
        Language | None, Field(alias="src_lang", description="Language of the input; for a model that translates.")
    ] = None
    target_language: Annotated[
        Language | None, Field(alias="tgt_lang", description="Language of the text; for a model that translates.")
    ] = None
    clean_up_tokenization_spaces: Annotated[Any, must_equal(False)] = None
    return_full_text: bool | None = Field(
        default=None, description="Return the prompt before the text; only for decoder-only models."
    )
    details: Annotated[bool | None, Field(description="Return the tokens with their log-probabilities.")] = None
    top_logprobs: TopLogprobs | None = Field(default=None, alias="top_n_tokens")
    best_of: Annotated[Any, must_equal(1)] = None
    decoder_input_details: Annotated[Any, must_equal(False)] = None
    watermark: Annotated[Any, must_equal(False)] = None
    truncate: Annotated[Any, must_equal()] = None
    grammar: Annotated[Any, must_equal()] = None
    adapter_id: Annotated[Any, must_equal()] = None

    @property
    def is_sampled(self) -> bool:
        return bool(
            self.do_sample
            or self.temperature not in (None, 1)
            or self.top_k
            or self.top_p not in (None, 1)
            or self.typical_p not in (None, 1)
        )


class TextGenerationBody(RequestBody):
    inputs: Annotated[Text, Field(description="Prompt.")]
    parameters: Annotated[TextGenerationParameters | None, Field(description="Generation parameters.")] = None
    stream: Annotated[bool | None, Field(description="Send server-sent events, one for each token.")] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A man is riding a bicycle."},
                {"inputs": "A dog runs.", "parameters": {"details": True, "top_n_tokens": 2, "stop": ["."]}},
                {"inputs": "A dog runs.", "parameters": {"do_sample": True, "temperature": 0.7, "seed": 7}},
                {"inputs": "A dog runs.", "parameters": {"max_new_tokens": 16, "details": True}, "stream": True},
            ]
        }
    )


class StreamedTextGenerationBody(TextGenerationBody):
    stream: Annotated[Literal[True], Field(description="Always true.")] = True

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": "A dog runs.", "parameters": {"max_new_tokens": 16}}]}
    )


class TextGenerationToken(TypedDict):
    id: Annotated[int, Field(description="Token id.")]
    text: Annotated[str, Field(description="Text of the token.")]
    logprob: Annotated[float, Field(description="Natural logarithm of its probability.")]
    special: Annotated[bool, Field(description="True for special tokens.")]


class TextGenerationDetails(TypedDict):
    finish_reason: Annotated[Literal["length", "eos_token", "stop_sequence"], Field(description="Reason for the end.")]
    generated_tokens: Annotated[int, Field(description="Number of generated tokens.")]
    seed: Annotated[int | None, Field(description="Seed of the sampling; null without sampling.")]
    prefill: Annotated[list[TextGenerationToken], Field(description="Always empty.")]
    tokens: Annotated[list[TextGenerationToken], Field(description="Generated tokens.")]
    top_tokens: NotRequired[
        Annotated[
            list[list[TextGenerationToken]],
            Field(description="Top alternatives of each token; only with `top_n_tokens`."),
        ]
    ]


class TextGenerationResponse(TypedDict):
    generated_text: Annotated[str, Field(description="Generated text.")]
    details: NotRequired[Annotated[TextGenerationDetails, Field(description="Details; only with `details`.")]]


class TextGenerationError(BaseModel):
    error: Annotated[str, Field(description="Explanation, after the path of the value at fault.")]
    error_type: Annotated[
        Literal["validation", "overloaded", "generation", "incomplete_generation"],
        Field(description="Type of the error."),
    ]
