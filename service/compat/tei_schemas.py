"""Requests and responses of Text Embeddings Inference. In a request, null equals omitting the field."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from typing_extensions import TypedDict

from service.api.types import Inputs, Truncate
from service.fields import (
    MAX_ID,
    MAX_INPUTS,
    RequestBody,
    Text,
    Texts,
    TextsWithoutIds,
    check_texts,
    only,
    refusal,
)
from service.parameters import TokenId


def _check_predicted(value: Any) -> Texts:
    """Check the inputs of a classification: ["a", "b"] is a pair of texts, and [["a"], ["b"]] a batch."""
    if isinstance(value, list) and value:
        is_batch = isinstance(value[0], list)
        value = [_alone(sequence, place) for place, sequence in enumerate(value)] if is_batch else _alone(value)
    return check_texts(value)


def _alone(sequence: Any, *path: int) -> Any:
    if isinstance(sequence, list) and len(sequence) == 1:
        return sequence[0]
    message = 'No model here reads pairs of texts; a batch is a list of lists: [["one text"], ["another"]].'
    raise refusal("unsupported_parameter", message, *path)


OneText = Annotated[list[Text], Field(min_length=1, max_length=1)]
Batch = Annotated[list[OneText], Field(min_length=1, max_length=MAX_INPUTS)]
PredictedInputs = Annotated[Texts, PlainValidator(_check_predicted, json_schema_input_type=Text | OneText | Batch)]
ListsOfIds = Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_INPUTS)]


class ReadingOptions(RequestBody):
    truncate: Truncate | None = None
    truncation_direction: Annotated[Any, only("right")] = None
    prompt_name: Annotated[Any, only()] = None


class EmbedAllBody(ReadingOptions):
    inputs: TextsWithoutIds

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
        default=None, description="Number of most probable labels to return."
    )
    function_to_apply: Annotated[Any, only("softmax")] = None


class PredictBody(RequestBody):
    inputs: PredictedInputs
    truncate: Truncate | None = None
    truncation_direction: Annotated[Any, only("right")] = None
    raw_scores: Annotated[Any, only(False)] = None
    parameters: PredictParameters | None = Field(
        default=None, description="With it the response has a list for each text."
    )

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
    add_special_tokens: bool | None = Field(default=None, description="True if absent.")
    prompt_name: Annotated[Any, only()] = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs."}]})


@dataclass(frozen=True)
class IdLists:
    """One list of token ids, or several."""

    lists: Sequence[Sequence[int]]
    is_list: bool


def _check_ids(value: Any) -> IdLists:
    if not isinstance(value, list):
        raise refusal("invalid_parameter", "It must be a list of token ids, or a list of such lists.")
    is_list = bool(value) and isinstance(value[0], list)
    lists = value if is_list else [value]
    if len(lists) > MAX_INPUTS:
        raise refusal("invalid_parameter", f"It has {len(lists)} lists; a call takes at most {MAX_INPUTS}.")
    for place, ids in enumerate(lists):
        path = (place,) if is_list else ()
        if not isinstance(ids, list):
            raise refusal("invalid_parameter", "It must be a list of token ids.", *path)
        for inner, id_ in enumerate(ids):
            if type(id_) is not int or not 0 <= id_ <= MAX_ID:
                raise refusal("invalid_parameter", f"It must be an integer from 0 to {MAX_ID}.", *path, inner)
    return IdLists(lists, is_list)


class DecodeBody(RequestBody):
    ids: Annotated[IdLists, PlainValidator(_check_ids, json_schema_input_type=list[TokenId] | ListsOfIds)]
    skip_special_tokens: bool | None = Field(default=None, description="True if absent.")

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [5, 6, 2]}, {"ids": [[5, 6], [7]]}]})


class Prediction(TypedDict):
    score: Annotated[float, Field(description="Its probability; those of all labels sum to 1.")]
    label: str


class SimpleToken(TypedDict):
    id: int
    text: str
    special: bool
    start: Annotated[int | None, Field(description="In bytes of UTF-8; null if it is special.")]
    stop: int | None


class EmbeddingError(BaseModel):
    error: str
    error_type: Literal["Empty", "Validation", "Overloaded", "Unhealthy", "Backend"]
