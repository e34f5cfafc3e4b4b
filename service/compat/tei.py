"""Endpoints of Text Embeddings Inference, except those that TGI has too (`huggingface`)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from sightline.base.bundle import Task
from sightline.service.api.endpoint import OUTPUT_ERRORS, PARAMETER_ERRORS, Call, Endpoint, ModelInQuery
from sightline.service.api_errors import ApiError, ErrorCode
from sightline.service.body_fields import Texts, construct
from sightline.service.compat.common import manifest_of_query, model_of_query, typed_errors
from sightline.service.compat.tei_schemas import (
    DecodeBody,
    EmbedAllBody,
    EmbedBody,
    EmbeddingError,
    PredictBody,
    Prediction,
    Rank,
    ReadingOptions,
    SimilarityBody,
    SimpleToken,
    SparseValue,
    TeiRerankBody,
    TokenClassificationBody,
    TokenClassificationParameters,
    TokenEntity,
    TokensBody,
    ZeroShotBody,
)
from sightline.service.inference.labels import function_of
from sightline.service.inference.service import models_by_task
from sightline.service.tasks import tokens
from sightline.service.tasks.classify import ClassifyBody, ClassifyResult, classify, classify_texts
from sightline.service.tasks.encode import EncodeBody, Pooling, encode
from sightline.service.tasks.rerank import RerankBody, rerank_documents
from sightline.service.tasks.sparse import embed_sparse
from sightline.service.tasks.tag import OUTSIDE, Aggregation, Entity, TagBody, tag_texts
from sightline.service.tasks.tokens import DetokenizeBody, InputToken, TokenizeBody, join_tokens

ERRORS = typed_errors(
    {"invalid_request_error": "Validation", "overloaded_error": "Overloaded", "server_error": "Backend"},
    {"empty_input": "Empty", "loading": "Unhealthy", "draining": "Unhealthy", "engine_dead": "Unhealthy"},
    EmbeddingError,
)


async def embed(call: Call, body: EmbedBody, model: ModelInQuery) -> list[Any]:
    """Encode each input to one vector of length 1, with the model's pooling."""
    encoded = _encode_body(call, body.inputs, body, model, normalize=body.normalize is not False)
    return (await encode(call, encoded, body.dimensions)).embeddings


async def embed_all(call: Call, body: EmbedAllBody, model: ModelInQuery) -> list[Any]:
    """Encode each input to one vector for each token."""
    result = await encode(call, _encode_body(call, body.inputs, body, model, pooling="none"))
    pairs = zip(result.embeddings, result.shapes or (), strict=True)
    return [rows.reshape(shape) for rows, shape in pairs]


async def sparse_vectors(call: Call, body: EmbedAllBody, model: ModelInQuery) -> list[list[SparseValue]]:
    """Encode each input to weights of tokens, without those that are 0.

    Only models that were trained for them, such as SPLADE, have useful sparse vectors.
    """
    served, truncate = await model_of_query(call, model, "sparse"), bool(body.truncate)
    vectors = await embed_sparse(call, served, body.inputs, truncate=truncate, prompt_name=body.prompt_name)
    return [
        [{"index": id_, "value": weight} for id_, weight in zip(ids.tolist(), weights.tolist(), strict=True)]
        for ids, weights in vectors
    ]


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
    result = await encode(call, _encode_body(call, texts, options, model, normalize=True))
    source, *others = result.embeddings
    return np.stack(others) @ source


def _encode_body(
    call: Call,
    inputs: Texts,
    options: ReadingOptions,
    model: str | None,
    *,
    normalize: bool | None = None,
    pooling: Pooling | None = None,
) -> EncodeBody:
    return construct(
        EncodeBody,
        model=manifest_of_query(call, model, "encode").name,
        inputs=inputs,
        pooling=pooling,
        normalize=normalize,
        prompt_name=options.prompt_name,
        truncate=bool(options.truncate),
    )


async def predict(call: Call, body: PredictBody, model: ModelInQuery) -> list[Prediction] | list[list[Prediction]]:
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
    options = construct(ClassifyBody, inputs=body.inputs, truncate=bool(body.truncate))
    result = await classify(call, served, options, raw_scores=raw_scores)
    predictions = _predictions(result, body.parameters.top_k if body.parameters else None)
    is_batch = body.inputs.is_list or body.parameters is not None
    return predictions if is_batch else predictions[0]


async def zero_shot(call: Call, body: ZeroShotBody, model: ModelInQuery) -> list[Prediction] | list[list[Prediction]]:
    """Return the score of each label of the request, as Hugging Face's zero-shot classification; a
    list for each text of a batch.
    """
    options = construct(
        ClassifyBody,
        model=manifest_of_query(call, model, "classify").name,
        inputs=body.inputs,
        truncate=bool(body.truncate),
        candidate_labels=body.parameters.candidate_labels,
        hypothesis_template=body.parameters.hypothesis_template,
        multi_label=body.parameters.multi_label,
    )
    predictions = _predictions(await classify_texts(call, options))
    return predictions if body.inputs.is_list else predictions[0]


def _predictions(result: ClassifyResult, top_k: int | None = None) -> list[list[Prediction]]:
    return [[{"score": pair.score, "label": pair.label} for pair in output.labels[:top_k]] for output in result.outputs]


async def rerank_texts(call: Call, body: TeiRerankBody, model: ModelInQuery) -> list[Rank]:
    """Sort texts by their relevance to a query."""
    options = construct(
        RerankBody,
        model=manifest_of_query(call, model, "rerank").name,
        query=body.query,
        documents=body.documents,
        raw_scores=bool(body.raw_scores),
        truncate=bool(body.truncate),
    )
    ranks = [(rank.index, rank.relevance_score) for rank in (await rerank_documents(call, options)).results]
    if body.return_text:
        return [{"index": index, "text": body.documents.texts[index], "score": score} for index, score in ranks]
    return [{"index": index, "score": score} for index, score in ranks]


async def tag_tokens(
    call: Call, body: TokenClassificationBody, model: ModelInQuery
) -> list[TokenEntity] | list[list[TokenEntity]]:
    """Find the entities of a text, as Hugging Face's token classification; a list for each text of
    a batch.
    """
    parameters = body.parameters or TokenClassificationParameters()
    aggregation: Aggregation = parameters.aggregation_strategy or "simple"
    options = construct(
        TagBody,
        model=manifest_of_query(call, model, "tag").name,
        inputs=body.inputs,
        aggregation=aggregation,
        ignore_labels=list(OUTSIDE) if parameters.ignore_labels is None else parameters.ignore_labels,
        truncate=bool(body.truncate),
    )
    result = await tag_texts(call, options)
    entities = [[_token_entity(entity, aggregation) for entity in output.entities] for output in result.outputs]
    return entities if body.inputs.is_list else entities[0]


def _token_entity(entity: Entity, aggregation: Aggregation) -> TokenEntity:
    place: TokenEntity = {"score": entity.score, "word": entity.text, "start": entity.start, "end": entity.end}
    if aggregation == "none":
        return {"entity": entity.label, "index": entity.token, **place}
    return {"entity_group": entity.label, **place}


async def tokenize_texts(call: Call, body: TokensBody, model: ModelInQuery) -> list[list[SimpleToken]]:
    """Split each input into tokens, with their positions in UTF-8 bytes."""
    name, is_special = manifest_of_query(call, model).name, body.add_special_tokens is not False
    options = construct(TokenizeBody, model=name, inputs=body.inputs, add_special_tokens=is_special)
    result = await tokens.tokenize_texts(call, options)
    pairs = zip(body.inputs.texts, result.outputs, strict=True)
    return [_with_bytes(text, tokens) for text, tokens in pairs]


def _with_bytes(text: str, parts: Sequence[InputToken]) -> list[SimpleToken]:
    offsets = [0, *accumulate(len(character.encode()) for character in text)]
    return [
        {
            "id": token.id,
            "text": token.text if token.special else text[token.start : token.end],
            "special": token.special,
            "start": None if token.special else offsets[token.start],
            "stop": None if token.special else offsets[token.end],
        }
        for token in parts
    ]


async def decode(call: Call, body: DecodeBody, model: ModelInQuery) -> list[str]:
    """Convert one or several lists of token ids to texts."""
    if not body.ids.is_list:
        call.field_names = {**call.field_names, "ids[0]": "ids"}
    name, skip, ids = manifest_of_query(call, model).name, body.skip_special_tokens is not False, body.ids.lists
    options = construct(DetokenizeBody, model=name, ids=list(map(list, ids)), side="source", skip_special_tokens=skip)
    return (await join_tokens(call, options)).texts


_JOINING: tuple[ErrorCode, ...] = ("model_not_found", "response_too_large")
_SPLITTING: tuple[ErrorCode, ...] = (*_JOINING, "empty_input", "unsupported_parameter")
_PREDICTIONS = list[Prediction] | list[list[Prediction]]
ENDPOINTS = (
    Endpoint("POST", "/embed", embed, list[list[float]], errors=OUTPUT_ERRORS, error_format=ERRORS),
    Endpoint("POST", "/embed_all", embed_all, list[list[list[float]]], errors=OUTPUT_ERRORS, error_format=ERRORS),
    Endpoint(
        "POST", "/embed_sparse", sparse_vectors, list[list[SparseValue]], errors=PARAMETER_ERRORS, error_format=ERRORS
    ),
    Endpoint("POST", "/similarity", similarity, list[float], errors=OUTPUT_ERRORS, error_format=ERRORS),
    Endpoint("POST", "/predict", predict, _PREDICTIONS, errors=PARAMETER_ERRORS, error_format=ERRORS),
    Endpoint("POST", "/rerank", rerank_texts, list[Rank], errors=PARAMETER_ERRORS, error_format=ERRORS),
    Endpoint("POST", "/tokenize", tokenize_texts, list[list[SimpleToken]], errors=_SPLITTING, error_format=ERRORS),
    Endpoint("POST", "/decode", decode, list[str], errors=_JOINING, error_format=ERRORS),
)
