"""Requests and responses of Text Embeddings Inference. In a request, null equals omitting the
field.
"""

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
    field_error,
    must_equal,
)
from service.parameters import TokenId


def _check_predicted(value: Any) -> Texts:
    """Check the inputs of a classification: ["a", "b"] is a pair of texts, and [["a"], ["b"]] a
    batch.
    """
    if isinstance(value, list) and value:
        is_batch = isinstance(value[0], list)
        value = [_alone(sequence, index) for index, sequence in enumerate(value)] if is_batch else _alone(value)
    return check_texts(value)


def _alone(sequence: Any, *path: int) -> Any:
    if isinstance(sequence, list) and len(sequence) == 1:
        return sequence[0]
    message = 'Pairs of texts are not supported; a batch is a list of lists: [["one text"], ["another"]].'
    raise field_error("unsupported_parameter", message, *path)


OneText = Annotated[list[Text], Field(min_length=1, max_length=1)]
Batch = Annotated[list[OneText], Field(min_length=1, max_length=MAX_INPUTS)]
PredictedInputs = Annotated[Texts, PlainValidator(_check_predicted, json_schema_input_type=Text | OneText | Batch)]
ListsOfIds = Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_INPUTS)]


class ReadingOptions(RequestBody):
    truncate: Annotated[
        Truncate | None, Field(description="Cut inputs that are too long instead of rejecting them.")
    ] = None
    truncation_direction: Annotated[Any, must_equal("right")] = None
    prompt_name: Annotated[Any, must_equal()] = None


class EmbedAllBody(ReadingOptions):
    inputs: Annotated[TextsWithoutIds, Field(description="Text to encode, or a list of texts.")]

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs."}]})


class EmbedBody(EmbedAllBody):
    normalize: bool | None = Field(default=None, description="Give each vector length 1; true if absent.")
    dimensions: int | None = Field(
        default=None, ge=1, le=MAX_ID, description="Only the dimensions of the model are supported."
    )
    encoding_format: Annotated[Any, must_equal("float")] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": "A dog runs."}, {"inputs": ["A dog runs.", "A cat sleeps."], "truncate": True}]
        }
    )


class Sentences(RequestBody):
    source_sentence: Annotated[Text, Field(description="Text to compare with the others.")]
    sentences: list[Text] = Field(
        description="Texts to compare the source sentence with.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_INPUTS - 1},
    )


class SimilarityBody(RequestBody):
    inputs: Annotated[Sentences, Field(description="Texts to compare.")]
    parameters: Annotated[ReadingOptions | None, Field(description="Options.")] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": {"source_sentence": "A dog runs.", "sentences": ["A cat runs.", "A man sleeps."]}}]
        }
    )


class PredictParameters(RequestBody):
    """Parameters of Hugging Face's text classification API, which TEI itself does not have."""

    top_k: Annotated[int, Field(ge=1, le=MAX_ID)] | None = Field(
        default=None, description="Number of most probable labels to return."
    )
    function_to_apply: Annotated[Any, must_equal("softmax")] = None


class PredictBody(RequestBody):
    inputs: Annotated[
        PredictedInputs, Field(description="Text to classify, a list with one text, or a list of such lists.")
    ]
    truncate: Annotated[
        Truncate | None, Field(description="Cut inputs that are too long instead of rejecting them.")
    ] = None
    truncation_direction: Annotated[Any, must_equal("right")] = None
    raw_scores: Annotated[Any, must_equal(False)] = None
    parameters: PredictParameters | None = Field(
        default=None, description="Options; if present, the response has a list for each text."
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
    add_special_tokens: bool | None = Field(
        default=None, description="Add the special tokens that the model expects; true if absent."
    )
    prompt_name: Annotated[Any, must_equal()] = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs."}]})


@dataclass(frozen=True)
class IdLists:
    """One list of token ids, or several."""

    lists: Annotated[Sequence[Sequence[int]], Field(description="The lists.")]
    is_list: Annotated[bool, Field(description="False for one list that is not in a list.")]


def _check_ids(value: Any) -> IdLists:
    if not isinstance(value, list):
        raise field_error("invalid_parameter", "It must be a list of token ids, or a list of such lists.")
    is_list = bool(value) and isinstance(value[0], list)
    lists = value if is_list else [value]
    if len(lists) > MAX_INPUTS:
        raise field_error("invalid_parameter", f"It must have at most {MAX_INPUTS} lists, got {len(lists)}.")
    for index, ids in enumerate(lists):
        path = (index,) if is_list else ()
        if not isinstance(ids, list):
            raise field_error("invalid_parameter", "It must be a list of token ids.", *path)
        for inner, id_ in enumerate(ids):
            if type(id_) is not int or not 0 <= id_ <= MAX_ID:
                raise field_error("invalid_parameter", f"It must be an integer from 0 to {MAX_ID}.", *path, inner)
    return IdLists(lists, is_list)


class DecodeBody(RequestBody):
    ids: Annotated[
        Annotated[IdLists, PlainValidator(_check_ids, json_schema_input_type=list[TokenId] | ListsOfIds)],
        Field(description="List of token ids, or a list of such lists."),
    ]
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text; true if absent."
    )

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [5, 6, 2]}, {"ids": [[5, 6], [7]]}]})


class Prediction(TypedDict):
    score: Annotated[float, Field(description="Probability of the label; the probabilities of all labels sum to 1.")]
    label: Annotated[str, Field(description="Name of the label.")]


class SimpleToken(TypedDict):
    id: Annotated[int, Field(description="Token id.")]
    text: Annotated[str, Field(description="Text of the token.")]
    special: Annotated[bool, Field(description="True for special tokens.")]
    start: Annotated[
        int | None, Field(description="Index of the first byte in the UTF-8 text; null for special tokens.")
    ]
    stop: Annotated[int | None, Field(description="Index after the last byte; null for special tokens.")]


class EmbeddingError(BaseModel):
    error: Annotated[str, Field(description="Explanation, after the path of the value at fault.")]
    error_type: Annotated[
        Literal["Empty", "Validation", "Overloaded", "Unhealthy", "Backend"], Field(description="Type of the error.")
    ]
