"""Requests and responses of Text Embeddings Inference; null in a request omits the field."""

from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from typing_extensions import TypedDict

from sightline.service.api.types import CandidateLabels, HypothesisTemplate, Inputs, MultiLabel, PromptName, Truncate
from sightline.service.body_fields import (
    MAX_ID,
    MAX_INPUTS,
    IdLists,
    RequestBody,
    Text,
    TextOrTexts,
    Texts,
    TextsWithoutIds,
    check_texts,
    check_texts_or_pairs,
    described_as,
    field_error,
    must_equal,
)
from sightline.service.compat.common import Dimensions
from sightline.service.parameters import TokenId
from sightline.service.tasks.tag import Aggregation, IgnoreLabels


def _check_predicted(value: Any) -> Texts:
    """Check the inputs of a classification: ["a"] is a text, ["a", "b"] a pair of texts, and
    [["a"], ["a", "b"]] a batch of both.
    """
    if not isinstance(value, list) or not value:
        return check_texts(value)
    if isinstance(value[0], list):
        return check_texts_or_pairs([_text_or_pair(sequence, index) for index, sequence in enumerate(value)])
    return replace(check_texts_or_pairs([_text_or_pair(value)]), is_list=False)


def _text_or_pair(sequence: Any, *path: int) -> Any:
    if isinstance(sequence, list) and len(sequence) in (1, 2):
        return sequence if len(sequence) == 2 else sequence[0]
    message = 'It must be a list of a text or a pair of texts; a batch is a list of such lists: [["text"], ["a", "b"]].'
    raise field_error("invalid_parameter", message, *path)


TextOrPair = Annotated[list[Text], Field(min_length=1, max_length=2)]
# TEI itself writes `Right`, and Hugging Face's client writes `right`.
TruncationDirection = Annotated[
    Any,
    must_equal("right"),
    BeforeValidator(
        lambda value: "right" if value == "Right" else value, json_schema_input_type=Literal["right", "Right"] | None
    ),
    Field(description="Only the end of a text can be cut."),
]
Batch = Annotated[list[TextOrPair], Field(min_length=1, max_length=MAX_INPUTS)]
PredictedInputs = Annotated[Texts, PlainValidator(_check_predicted, json_schema_input_type=Text | TextOrPair | Batch)]
ListsOfIds = Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_INPUTS)]


class ReadingOptions(RequestBody):
    truncate: Truncate | None = None
    truncation_direction: TruncationDirection = None
    prompt_name: PromptName = None


class EmbedAllBody(ReadingOptions):
    inputs: Annotated[TextsWithoutIds, Field(description="Text to encode, or a list of texts.")]

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs."}]})


class EmbedBody(EmbedAllBody):
    normalize: bool | None = Field(default=None, description="Give each vector length 1; true if absent.")
    dimensions: Dimensions = None
    encoding_format: Annotated[Any, must_equal("float")] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": "A dog runs."}, {"inputs": ["A dog runs.", "A cat sleeps."], "truncate": True}]
        }
    )


class SparseValue(TypedDict):
    """The weight of a token."""

    index: Annotated[int, Field(description="Token id.")]
    value: Annotated[float, Field(description="Its weight, above 0.")]


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
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        default=None,
        description="Only the model's own function: softmax if its labels exclude each other; otherwise sigmoid, or "
        "none for logits.",
    )


class PredictBody(RequestBody):
    inputs: Annotated[
        PredictedInputs,
        Field(description="Text to classify, a list with a text or a pair of texts, or a list of such lists."),
    ]
    truncate: Truncate | None = None
    truncation_direction: TruncationDirection = None
    raw_scores: bool | None = Field(
        default=None, description="Return logits instead of probabilities, if the model has logits."
    )
    parameters: PredictParameters | None = Field(
        default=None, description="Options; if present, the response has a list for each text."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "a stirring , funny film ."},
                {"inputs": [["a stirring , funny film ."], ["a long string of cliches ."]], "truncate": True},
                {"inputs": "a stirring , funny film .", "parameters": {"top_k": 1}},
                {"inputs": [["a stirring , funny film .", "a long string of cliches ."]]},
            ]
        }
    )


class TeiRerankBody(RequestBody):
    query: Annotated[Text, Field(description="Text to which the others are compared.")]
    documents: Annotated[TextOrTexts, Field(alias="texts", description="Texts to rank.")]
    truncate: Annotated[
        Truncate | None, Field(description="Cut pairs of texts that are too long instead of rejecting them.")
    ] = None
    truncation_direction: TruncationDirection = None
    raw_scores: bool | None = Field(
        default=None, description="Return the logits of the model instead of their sigmoid, a probability."
    )
    return_text: bool | None = Field(default=None, description="Return the texts.")

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "Who runs?", "texts": ["A dog runs.", "A man sleeps."]}]}
    )


class ZeroShotParameters(RequestBody):
    """Parameters of Hugging Face's zero-shot classification."""

    candidate_labels: CandidateLabels
    hypothesis_template: HypothesisTemplate | None = None
    multi_label: MultiLabel | None = None


class ZeroShotBody(RequestBody):
    """Body of Hugging Face's zero-shot classification."""

    inputs: Inputs
    truncate: Truncate | None = None
    parameters: Annotated[ZeroShotParameters, Field(description="Labels and options.")]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "inputs": "The train was late again.",
                    "parameters": {"candidate_labels": ["travel", "sports", "cooking"]},
                }
            ]
        }
    )


class TokenClassificationParameters(RequestBody):
    """Parameters of Hugging Face's token classification API."""

    aggregation_strategy: Annotated[Any, described_as(Aggregation | None)] = Field(
        default=None, description="Merging of tokens into entities: `simple`, the default, or `none`."
    )
    ignore_labels: IgnoreLabels | None = None
    stride: Annotated[Any, must_equal(0)] = None

    @model_validator(mode="after")
    def _check_aggregation(self) -> Self:
        if self.aggregation_strategy not in (None, *get_args(Aggregation)):
            raise field_error("unsupported_parameter", "It must be simple or none.", "aggregation_strategy")
        return self


class TokenClassificationBody(RequestBody):
    inputs: Annotated[TextOrTexts, Field(description="Text to classify the tokens of, or a list of texts.")]
    truncate: Truncate | None = None
    parameters: Annotated[TokenClassificationParameters | None, Field(description="Options.")] = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs in Berlin."}]})


class TokensBody(RequestBody):
    inputs: Inputs
    add_special_tokens: bool | None = Field(
        default=None, description="Add the special tokens that the model expects; true if absent."
    )
    prompt_name: Annotated[Any, must_equal()] = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "A dog runs."}]})


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
    return IdLists(tuple(map(tuple, lists)), is_list)


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
    score: Annotated[float, Field(description="Probability of the label, or its logit with `raw_scores`.")]
    label: Annotated[str, Field(description="Name of the label.")]


class Rank(TypedDict):
    index: Annotated[int, Field(description="Index of the text in the request.")]
    text: NotRequired[Annotated[str, Field(description="The text; only with `return_text`.")]]
    score: Annotated[float, Field(description="Probability that the text is relevant, or its logit with `raw_scores`.")]


class TokenEntity(TypedDict):
    """An entity, or with `aggregation_strategy` none a token. Indices count characters."""

    entity_group: NotRequired[Annotated[str, Field(description="Label of an entity.")]]
    entity: NotRequired[Annotated[str, Field(description="Label of a token.")]]
    index: NotRequired[Annotated[int, Field(description="Index of a token.")]]
    score: Annotated[float, Field(description="Probability of the label.")]
    word: Annotated[str, Field(description="Text of the entity.")]
    start: Annotated[int, Field(description="Index of its first character.")]
    end: Annotated[int, Field(description="Index after its last character.")]


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
