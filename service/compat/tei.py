"""Endpoints of Text Embeddings Inference, except those that TGI has too (`huggingface`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, PlainValidator
from typing_extensions import TypedDict

from sightline.base.bundle import Task
from sightline.service.api.endpoint import OUTPUT_ERRORS, PARAMETER_ERRORS, Call, Endpoint, ModelInQuery
from sightline.service.api.types import Inputs, PromptName, Truncate
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import (
    MAX_ID,
    MAX_INPUTS,
    RequestBody,
    Text,
    TextOrTexts,
    Texts,
    TextsWithoutIds,
    check_texts,
    check_texts_or_pairs,
    construct,
    field_error,
    must_equal,
)
from sightline.service.compat.common import Dimensions, manifest_of_query, model_of_query, typed_errors
from sightline.service.engine.request import Encoded
from sightline.service.inference.labels import function_of
from sightline.service.inference.results import FLOAT_BYTES
from sightline.service.inference.service import models_by_task
from sightline.service.inference.source_encoding import encode_sources, read_sources
from sightline.service.tasks import classify, encode, rerank, tag

BYTES_PER_WEIGHT = 320  # of a sparse vector in a response: an object, its numbers, and their JSON


class EmbeddingError(BaseModel):
    error: Annotated[str, Field(description="Explanation, after the path of the value at fault.")]
    error_type: Annotated[
        Literal["Empty", "Validation", "Overloaded", "Unhealthy", "Backend"], Field(description="Type of the error.")
    ]


ERRORS = typed_errors(
    {"invalid_request_error": "Validation", "overloaded_error": "Overloaded", "server_error": "Backend"},
    {"empty_input": "Empty", "loading": "Unhealthy", "draining": "Unhealthy", "engine_dead": "Unhealthy"},
    EmbeddingError,
)
# TEI itself writes `Right`, and Hugging Face's client writes `right`. The document has only one,
# because generators of clients make the same name of both.
TruncationDirection = Annotated[
    Any,
    must_equal("right"),
    BeforeValidator(
        lambda value: "right" if value == "Right" else value, json_schema_input_type=Literal["right"] | None
    ),
    Field(description="Only the end of a text can be cut."),
]


class ReadingOptions(RequestBody):
    truncate: Truncate | None = None
    truncation_direction: TruncationDirection = None
    prompt_name: PromptName = None


class EmbedAllBody(ReadingOptions):
    inputs: Annotated[TextsWithoutIds, Field(description="Text to encode, or a list of texts.")]

    EXAMPLES: ClassVar[Sequence[Any]] = ({"inputs": "A dog runs."},)


class EmbedBody(EmbedAllBody):
    normalize: bool | None = Field(default=None, description="Give each vector length 1; true if absent.")
    dimensions: Dimensions = None
    encoding_format: Annotated[Any, must_equal("float")] = None

    EXAMPLES = ({"inputs": "A dog runs."}, {"inputs": ["A dog runs.", "A cat sleeps."], "truncate": True})


async def embed(call: Call, body: EmbedBody, model: ModelInQuery) -> list[Any]:
    """Encode each input to one vector of length 1, with the model's pooling."""
    encoded = _encode_body(call, body.inputs, body, model, normalize=body.normalize is not False)
    return (await encode.encode(call, encoded, body.dimensions)).embeddings


async def embed_all(call: Call, body: EmbedAllBody, model: ModelInQuery) -> list[Any]:
    """Encode each input to one vector for each token."""
    result = await encode.encode(call, _encode_body(call, body.inputs, body, model, pooling="none"))
    pairs = zip(result.embeddings, result.shapes or (), strict=True)
    return [rows.reshape(shape) for rows, shape in pairs]


class SparseValue(TypedDict):
    """The weight of a token."""

    index: Annotated[int, Field(description="Token id.")]
    value: Annotated[float, Field(description="Its weight, above 0.")]


async def sparse_vectors(call: Call, body: EmbedAllBody, model: ModelInQuery) -> list[list[SparseValue]]:
    """Encode each input to weights of tokens, without those that are 0.

    Only models that were trained for them, such as SPLADE, have useful sparse vectors.
    """
    served = await model_of_query(call, model, "sparse")
    texts = encode.with_prompt(served.manifest, body.inputs, body.prompt_name)
    admitted, sources = await read_sources(call, served, texts, truncate=bool(body.truncate))
    call.response_memory.reserve(2 * FLOAT_BYTES * served.manifest.limits.vocabulary * len(sources))

    def convert(index: int, result: Encoded) -> list[SparseValue]:
        # The weight of a token is the maximum of log(1 + max(0, x)) over all positions of the text,
        # with the logit x of the token there (Formal et al. 2021, "SPLADE v2", equations 1 and 6).
        assert result.largest is not None
        weights = np.log1p(np.maximum(result.largest, 0))
        (ids,) = weights.nonzero()
        call.response_memory.reserve(BYTES_PER_WEIGHT * len(ids))
        return [{"index": id_, "value": value} for id_, value in zip(ids.tolist(), weights[ids].tolist(), strict=True)]

    vectors, _, _ = await encode_sources(admitted, sources, convert, return_largest=True)
    return vectors


class Sentences(RequestBody):
    source_sentence: Annotated[Text, Field(description="Text to compare with the others.")]
    sentences: list[Text] = Field(
        description="Texts to compare the source sentence with.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_INPUTS - 1},
    )


class SimilarityBody(RequestBody):
    inputs: Annotated[Sentences, Field(description="Texts to compare.")]
    parameters: Annotated[ReadingOptions | None, Field(description="Options.")] = None

    EXAMPLES = ({"inputs": {"source_sentence": "A dog runs.", "sentences": ["A cat runs.", "A man sleeps."]}},)


async def similarity(call: Call, body: SimilarityBody, model: ModelInQuery) -> Any:
    """Return the cosine similarities of a sentence with other sentences."""
    sentences = body.inputs.sentences
    if not sentences:
        raise ApiError("empty_input", "It is an empty list.", path="inputs.sentences")
    limit = call.service.settings.max_inputs - 1  # the source sentence is an input too
    if len(sentences) > limit:
        message = f"It must have at most {limit} strings (SIGHTLINE_MAX_INPUTS), got {len(sentences)}."
        raise ApiError("invalid_parameter", message, path="inputs.sentences")
    call.field_names = {
        **call.field_names,
        "inputs[0]": "inputs.source_sentence",
        **{f"inputs[{index + 1}]": f"inputs.sentences[{index}]" for index in range(len(sentences))},
    }
    options = body.parameters or ReadingOptions()
    texts = Texts((body.inputs.source_sentence, *sentences))
    result = await encode.encode(call, _encode_body(call, texts, options, model, normalize=True))
    source, *others = result.embeddings
    return np.stack(others) @ source


def _encode_body(
    call: Call, inputs: Texts, options: ReadingOptions, model: str | None, **settings: Any
) -> encode.EncodeBody:
    name = manifest_of_query(call, model, "encode").name
    settings |= {"prompt_name": options.prompt_name, "truncate": bool(options.truncate)}
    return construct(encode.EncodeBody, model=name, inputs=inputs, **settings)


def _text_or_pair(sequence: Any, *path: int) -> Any:
    if isinstance(sequence, list) and len(sequence) in (1, 2):
        return sequence if len(sequence) == 2 else sequence[0]
    message = 'It must be a list of a text or a pair of texts; a batch is a list of such lists: [["text"], ["a", "b"]].'
    raise field_error("invalid_parameter", message, *path)


def _check_predicted(value: Any) -> Texts:
    """Check the inputs of a classification: ["a"] is a text, ["a", "b"] a pair of texts, and
    [["a"], ["a", "b"]] a batch of both.
    """
    if not isinstance(value, list) or not value:
        return check_texts(value)
    if isinstance(value[0], list):
        return check_texts_or_pairs([_text_or_pair(sequence, index) for index, sequence in enumerate(value)])
    return replace(check_texts_or_pairs([_text_or_pair(value)]), is_list=False)


TextOrPair = Annotated[list[Text], Field(min_length=1, max_length=2)]
Batch = Annotated[list[TextOrPair], Field(min_length=1, max_length=MAX_INPUTS)]
PredictedInputs = Annotated[Texts, PlainValidator(_check_predicted, json_schema_input_type=Text | TextOrPair | Batch)]


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

    EXAMPLES = (
        {"inputs": "a stirring , funny film ."},
        {"inputs": [["a stirring , funny film ."], ["a long string of cliches ."]], "truncate": True},
        {"inputs": "a stirring , funny film .", "parameters": {"top_k": 1}},
        {"inputs": [["a stirring , funny film .", "a long string of cliches ."]]},
    )


class Prediction(TypedDict):
    score: Annotated[float, Field(description="Probability of the label, or its logit with `raw_scores`.")]
    label: Annotated[str, Field(description="Name of the label.")]


Predictions = list[Prediction] | list[list[Prediction]]


async def predict(call: Call, body: PredictBody, model: ModelInQuery) -> Predictions:
    """Return the probability of each label, the most probable first; a list for each text of a
    batch.

    An input is a text or a pair of texts. A reranker has one label.
    """
    able = models_by_task(call.service.manifests)
    default_for: Task = "rerank" if "rerank" in able and "classify" not in able else "classify"
    manifest = manifest_of_query(call, model, default_for=default_for)
    served = await model_of_query(call, manifest.name, "rerank" if "rerank" in manifest.tasks else "classify")
    raw_scores = bool(body.raw_scores)
    requested = body.parameters.function_to_apply if body.parameters else None
    if requested is not None:
        raw_scores |= requested == "none" and manifest.label_kind != "classes"
        function = function_of(manifest.label_kind, raw_scores)
        if requested != function:
            message = f"It must be {function} for {manifest.name}, got {requested}."
            raise ApiError("unsupported_parameter", message, path="parameters.function_to_apply")
    options = construct(classify.ClassifyBody, inputs=body.inputs, truncate=bool(body.truncate))
    result = await classify.classify(call, served, options, raw_scores=raw_scores)
    predictions = _predictions(result, body.parameters.top_k if body.parameters else None)
    is_batch = body.inputs.is_list or body.parameters is not None
    return predictions if is_batch else predictions[0]


class ZeroShotParameters(RequestBody):
    """Parameters of Hugging Face's zero-shot classification."""

    candidate_labels: classify.CandidateLabels
    hypothesis_template: classify.HypothesisTemplate | None = None
    multi_label: classify.MultiLabel | None = None


class ZeroShotBody(RequestBody):
    """Body of Hugging Face's zero-shot classification."""

    inputs: Inputs
    truncate: Truncate | None = None
    parameters: Annotated[ZeroShotParameters, Field(description="Labels and options.")]

    EXAMPLES = (
        {"inputs": "The train was late again.", "parameters": {"candidate_labels": ["travel", "sports", "cooking"]}},
    )


async def zero_shot(call: Call, body: ZeroShotBody, model: ModelInQuery) -> Predictions:
    """Return the score of each label of the request, as Hugging Face's zero-shot classification; a
    list for each text of a batch.
    """
    options = construct(
        classify.ClassifyBody,
        model=manifest_of_query(call, model, "classify").name,
        inputs=body.inputs,
        truncate=bool(body.truncate),
        candidate_labels=body.parameters.candidate_labels,
        hypothesis_template=body.parameters.hypothesis_template,
        multi_label=body.parameters.multi_label,
    )
    predictions = _predictions(await classify.classify_texts(call, options))
    return predictions if body.inputs.is_list else predictions[0]


def _predictions(result: classify.ClassifyResult, top_k: int | None = None) -> list[list[Prediction]]:
    return [[{"score": pair.score, "label": pair.label} for pair in output.labels[:top_k]] for output in result.outputs]


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

    EXAMPLES = ({"query": "Who runs?", "texts": ["A dog runs.", "A man sleeps."]},)


class Rank(TypedDict):
    index: Annotated[int, Field(description="Index of the text in the request.")]
    text: NotRequired[Annotated[str, Field(description="The text; only with `return_text`.")]]
    score: Annotated[float, Field(description="Probability that the text is relevant, or its logit with `raw_scores`.")]


async def rerank_texts(call: Call, body: TeiRerankBody, model: ModelInQuery) -> list[Rank]:
    """Sort texts by their relevance to a query."""
    options = construct(
        rerank.RerankBody,
        model=manifest_of_query(call, model, "rerank").name,
        query=body.query,
        documents=body.documents,
        raw_scores=bool(body.raw_scores),
        truncate=bool(body.truncate),
    )
    ranks = [(rank.index, rank.relevance_score) for rank in (await rerank.rerank_documents(call, options)).results]
    if body.return_text:
        return [{"index": index, "text": body.documents.texts[index], "score": score} for index, score in ranks]
    return [{"index": index, "score": score} for index, score in ranks]


class TokenClassificationParameters(RequestBody):
    """Parameters of Hugging Face's token classification API."""

    aggregation_strategy: tag.Aggregation | None = Field(
        default=None, description="Merging of tokens into entities: `simple`, the default, or `none`."
    )
    ignore_labels: tag.IgnoreLabels | None = None
    stride: Annotated[Any, must_equal(0)] = None


class TokenClassificationBody(RequestBody):
    inputs: Annotated[TextOrTexts, Field(description="Text to classify the tokens of, or a list of texts.")]
    truncate: Truncate | None = None
    parameters: Annotated[TokenClassificationParameters | None, Field(description="Options.")] = None

    EXAMPLES = ({"inputs": "A dog runs in Berlin."},)


class TokenEntity(TypedDict):
    """An entity, or with `aggregation_strategy` none a token. Indices count characters."""

    entity_group: NotRequired[Annotated[str, Field(description="Label of an entity.")]]
    entity: NotRequired[Annotated[str, Field(description="Label of a token.")]]
    index: NotRequired[Annotated[int, Field(description="Index of a token.")]]
    score: Annotated[float, Field(description="Probability of the label.")]
    word: Annotated[str, Field(description="Text of the entity.")]
    start: Annotated[int, Field(description="Index of its first character.")]
    end: Annotated[int, Field(description="Index after its last character.")]


TokenEntities = list[TokenEntity] | list[list[TokenEntity]]


async def tag_tokens(call: Call, body: TokenClassificationBody, model: ModelInQuery) -> TokenEntities:
    """Find the entities of a text, as Hugging Face's token classification; a list for each text of
    a batch.
    """
    parameters = body.parameters or TokenClassificationParameters()
    aggregation: tag.Aggregation = parameters.aggregation_strategy or "simple"
    options = construct(
        tag.TagBody,
        model=manifest_of_query(call, model, "tag").name,
        inputs=body.inputs,
        aggregation=aggregation,
        ignore_labels=list(tag.OUTSIDE) if parameters.ignore_labels is None else parameters.ignore_labels,
        truncate=bool(body.truncate),
    )
    result = await tag.tag_texts(call, options)
    entities = [[_token_entity(entity, aggregation) for entity in output.entities] for output in result.outputs]
    return entities if body.inputs.is_list else entities[0]


def _token_entity(entity: tag.Entity, aggregation: tag.Aggregation) -> TokenEntity:
    place: TokenEntity = {"score": entity.score, "word": entity.text, "start": entity.start, "end": entity.end}
    if aggregation == "none":
        return {"entity": entity.label, "index": entity.token, **place}
    return {"entity_group": entity.label, **place}


ENDPOINTS = (
    Endpoint("POST", "/embed", embed, list[list[float]], errors=OUTPUT_ERRORS),
    Endpoint("POST", "/embed_all", embed_all, list[list[list[float]]], errors=OUTPUT_ERRORS),
    Endpoint("POST", "/embed_sparse", sparse_vectors, list[list[SparseValue]], errors=PARAMETER_ERRORS),
    Endpoint("POST", "/similarity", similarity, list[float], errors=OUTPUT_ERRORS),
    Endpoint("POST", "/predict", predict, Predictions, errors=PARAMETER_ERRORS),
    Endpoint("POST", "/rerank", rerank_texts, list[Rank], errors=PARAMETER_ERRORS),
)
