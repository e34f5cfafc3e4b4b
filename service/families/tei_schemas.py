"""What clients of Text Embeddings Inference send and read. Null means what absence means."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from service.fields import (
    MAX_ID,
    MAX_INPUTS,
    TEXTS_SCHEMA,
    RequestBody,
    Text,
    Texts,
    described_as,
    only,
    refusal,
    texts_without_ids,
)
from service.parameters import TokenId
from service.schemas import Inputs, Truncate


def _check_predicted(value: Any) -> Any:
    """What `POST /v1/classify` takes as its inputs: ["a", "b"] is a pair of texts, and [["a"], ["b"]] a batch."""
    if not isinstance(value, list) or not value:
        return value
    if not isinstance(value[0], list):
        return _alone(value)
    return [_alone(sequence, place) for place, sequence in enumerate(value)]


def _alone(sequence: Any, *path: int) -> Any:
    if isinstance(sequence, list) and len(sequence) == 1:
        return sequence[0]
    message = 'No model here reads pairs of texts; a batch is a list of lists: [["one text"], ["another"]].'
    raise refusal("unsupported_parameter", message, *path)


OneText = Annotated[list[Text], Field(min_length=1, max_length=1)]
Batch = Annotated[list[OneText], Field(min_length=1, max_length=MAX_INPUTS)]
PredictedInputs = Annotated[Any, PlainValidator(_check_predicted, json_schema_input_type=Text | OneText | Batch)]
ListsOfIds = Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_INPUTS)]


class ReadingOptions(RequestBody):
    truncate: Truncate | None = None
    truncation_direction: Annotated[Any, only("right")] = None
    prompt_name: Annotated[Any, only()] = None


class EmbedAllBody(ReadingOptions):
    inputs: Annotated[Texts, PlainValidator(texts_without_ids("inputs")), TEXTS_SCHEMA]

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs."}]})


class EmbedBody(EmbedAllBody):
    normalize: bool | None = Field(default=None, description="Give each vector length 1, unless it is false.")
    dimensions: int | None = Field(default=None, ge=1, le=MAX_ID, description="Those of the model and no others.")
    encoding_format: Annotated[Any, only("float")] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": "A dog runs."}, {"inputs": ["A dog runs.", "A cat sleeps."], "truncate": True}]
        }
    )


class Sentences(RequestBody):
    source_sentence: Text
    sentences: list[Text] = Field(
        description="With the source sentence no more texts than a call takes.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_INPUTS - 1},
    )


class SimilarityBody(RequestBody):
    inputs: Sentences
    parameters: ReadingOptions | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": {"source_sentence": "A dog runs.", "sentences": ["A cat runs.", "A man sleeps."]}}]
        }
    )


class PredictParameters(RequestBody):
    """Hugging Face's for text classification, where TEI has none."""

    top_k: Annotated[int, Field(ge=1, le=MAX_ID)] | None = Field(
        default=None, description="So many labels, the likeliest."
    )
    function_to_apply: Annotated[Any, only("softmax")] = None


class PredictBody(RequestBody):
    inputs: PredictedInputs
    truncate: Truncate | None = None
    truncation_direction: Annotated[Any, only("right")] = None
    raw_scores: Annotated[Any, only(False)] = None
    parameters: PredictParameters | None = Field(default=None, description="With it the answer is a list a text.")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "a stirring , funny film ."},
                {"inputs": [["a stirring , funny film ."], ["a long string of cliches ."]], "truncate": True},
                {"inputs": "a stirring , funny film .", "parameters": {"top_k": 1}},
            ]
        }
    )


class TokensBody(RequestBody):
    inputs: Inputs
    add_special_tokens: bool | None = Field(default=None, description="Unless it is false.")
    prompt_name: Annotated[Any, only()] = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs."}]})


class DecodeBody(RequestBody):
    ids: Annotated[Any, described_as(list[TokenId] | ListsOfIds)]
    skip_special_tokens: bool | None = Field(default=None, description="Unless it is false.")

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [5, 6, 2]}, {"ids": [[5, 6], [7]]}]})


class Prediction(BaseModel):
    score: float = Field(description="Its probability; those of all labels sum to 1.")
    label: str


class SimpleToken(BaseModel):
    id: int
    text: str
    special: bool
    start: int | None = Field(description="In bytes of UTF-8; null where it is special.")
    stop: int | None


class EmbeddingError(BaseModel):
    error: str
    error_type: Literal["Empty", "Validation", "Overloaded", "Unhealthy", "Backend"]
