"""Requests and responses of Text Generation Inference. In a request, null equals omitting the field."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from service.fields import RequestBody, Text, only
from service.parameters import (
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
    max_new_tokens: NumNewTokens | None = Field(default=None, description="128, or the model's limit if that is less.")
    do_sample: bool | None = Field(
        default=None,
        description="Sample each token; so do a temperature other than 1, a top_k, and a top_p or typical_p below 1.",
    )
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    typical_p: TypicalP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    repetition_penalty: RepetitionPenalty | None = None
    return_full_text: bool | None = Field(
        default=None, description="Return the prompt before the text; only of a model that continues its prompt."
    )
    details: bool | None = None
    top_n_tokens: TopLogprobs | None = None
    best_of: Annotated[Any, only(1)] = None
    decoder_input_details: Annotated[Any, only(False)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    watermark: Annotated[Any, only(False)] = None
    truncate: Annotated[Any, only()] = None
    grammar: Annotated[Any, only()] = None
    adapter_id: Annotated[Any, only()] = None

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
    inputs: Text
    parameters: TextGenerationParameters | None = None
    stream: bool | None = None

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
    stream: Literal[True] = True

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": "A dog runs.", "parameters": {"max_new_tokens": 16}}]}
    )


class TextGenerationToken(TypedDict):
    id: int
    text: str
    logprob: float
    special: bool


class TextGenerationDetails(TypedDict):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: Annotated[int | None, Field(description="Null if nothing was sampled.")]
    prefill: Annotated[list[TextGenerationToken], Field(description="Always empty.")]
    tokens: list[TextGenerationToken]
    top_tokens: NotRequired[Annotated[list[list[TextGenerationToken]], Field(description="Only with top_n_tokens.")]]


class TextGenerationResponse(TypedDict):
    generated_text: str
    details: NotRequired[Annotated[TextGenerationDetails, Field(description="Only with details.")]]


class TextGenerationError(BaseModel):
    error: str
    error_type: Literal["validation", "overloaded", "generation", "incomplete_generation"]
