"""What clients of Text Generation Inference send and read. Null means what absence means."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
)


class TextGenerationParameters(RequestBody):
    max_new_tokens: NumNewTokens | None = Field(default=None, description="128, or the model's limit if that is less.")
    do_sample: bool | None = Field(
        default=None, description="Draw each token; so does a temperature other than 1, a top_k, and a top_p below 1."
    )
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    repetition_penalty: RepetitionPenalty | None = None
    return_full_text: bool | None = Field(
        default=None, description="The prompt before the text; only of a model that goes on with its prompt."
    )
    details: bool | None = None
    top_n_tokens: TopLogprobs | None = None
    best_of: Annotated[Any, only(1)] = None
    decoder_input_details: Annotated[Any, only(False)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    typical_p: Annotated[Any, only(1)] = None
    watermark: Annotated[Any, only(False)] = None
    truncate: Annotated[Any, only()] = None
    grammar: Annotated[Any, only()] = None
    adapter_id: Annotated[Any, only()] = None

    @property
    def is_drawn(self) -> bool:
        return bool(self.do_sample or self.temperature not in (None, 1) or self.top_k or self.top_p not in (None, 1))


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


class TextGenerationToken(BaseModel):
    id: int
    text: str
    logprob: float
    special: bool


class TextGenerationDetails(BaseModel):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None = Field(description="Null where nothing was drawn.")
    prefill: list[TextGenerationToken] = Field(description="Always empty.")
    tokens: list[TextGenerationToken]
    top_tokens: list[list[TextGenerationToken]] | None = Field(default=None, description="Only with top_n_tokens.")


class TextGenerationAnswer(BaseModel):
    generated_text: str
    details: TextGenerationDetails | None = Field(default=None, description="Only with details.")


class TextGenerationError(BaseModel):
    error: str
    error_type: Literal["validation", "overloaded", "generation", "incomplete_generation"]
