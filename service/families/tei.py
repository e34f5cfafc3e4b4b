"""Text Embeddings Inference's routes; what it shares with TGI is in `huggingface`."""

from itertools import accumulate
from typing import Any

import numpy as np
from fastapi import FastAPI
from starlette.responses import Response

from service.bodies import check_body
from service.calls import Call, json_answer
from service.errors import ApiError, ErrorCode
from service.families.common import check_dimensions, model_of_query, typed_errors
from service.families.naming import naming
from service.families.tei_schemas import (
    DecodeBody,
    EmbedAllBody,
    EmbedBody,
    EmbeddingError,
    PredictBody,
    Prediction,
    SimilarityBody,
    SimpleToken,
    TokensBody,
)
from service.routes.classify import classified
from service.routes.encode import encoded
from service.routes.tokens import detokenized, tokenized
from service.routing import TASK_ERRORS, add_route
from service.schemas import ClassifyBody, DetokenizeBody, EncodeBody, TokenizeBody

ERRORS = typed_errors(
    {"invalid_request_error": "Validation", "overloaded_error": "Overloaded", "server_error": "Backend"},
    {"empty_input": "Empty", "loading": "Unhealthy", "draining": "Unhealthy", "engine_dead": "Unhealthy"},
    EmbeddingError,
)


async def embed(body: EmbedBody, call: Call) -> Response:
    """Encode each input to one vector: the mean over its tokens, of length 1."""
    answer = await _encoded(call, body.inputs.copies(1), body.truncate, normalize=body.normalize is not False)
    check_dimensions(body.dimensions, answer)
    return json_answer(answer["embeddings"])


async def embed_all(body: EmbedAllBody, call: Call) -> Response:
    """Encode each input to a vector a token."""
    answer = await _encoded(call, body.inputs.copies(1), body.truncate, pooling="none")
    pairs = zip(answer["embeddings"], answer["shapes"], strict=True)
    return json_answer([rows.reshape(shape) for rows, shape in pairs])


async def similarity(body: SimilarityBody, call: Call) -> Response:
    """Compare a sentence with others: the cosine of its vector with that of each."""
    sentences = body.inputs.sentences
    if not sentences:
        raise ApiError("empty_input", "The list is empty.", param="inputs.sentences")
    names = {f"inputs[{place + 1}]": f"inputs.sentences[{place}]" for place in range(len(sentences))}
    with naming({"inputs": "inputs.sentences", "inputs[0]": "inputs.source_sentence"} | names):
        truncate = body.parameters.truncate if body.parameters else None
        answer = await _encoded(call, [body.inputs.source_sentence, *sentences], truncate, normalize=True)
    source, *others = answer["embeddings"]
    return json_answer(np.stack(others) @ source)


async def _encoded(call: Call, inputs: str | list[str], truncate: bool | None, **options: Any) -> dict[str, Any]:
    model = model_of_query(call, "encode")
    wanted = {"model": model.name, "inputs": inputs, "truncate": bool(truncate), **options}
    return await encoded(check_body(wanted, EncodeBody), call)


async def predict(body: PredictBody, call: Call) -> Response:
    """Say how likely each label of a text is, the likeliest first; of a batch a list for each text."""
    model = model_of_query(call, "classify")
    wanted = {"model": model.name, "inputs": body.inputs, "truncate": bool(body.truncate)}
    answer = await classified(check_body(wanted, ClassifyBody), call)
    top_k = body.parameters.top_k if body.parameters else None
    predictions = [
        [{"score": one["score"], "label": one["label"]} for one in output["labels"][:top_k]]
        for output in answer["outputs"]
    ]
    is_batch = isinstance(body.inputs, list) or body.parameters is not None
    return json_answer(predictions if is_batch else predictions[0])


async def tokenize(body: TokensBody, call: Call) -> Response:
    """Split each input into tokens, each with its place in the text in bytes of UTF-8."""
    model = model_of_query(call)
    add_special_tokens = body.add_special_tokens is not False
    wanted = {"model": model.name, "inputs": body.inputs.copies(1), "add_special_tokens": add_special_tokens}
    answer = await tokenized(check_body(wanted, TokenizeBody), call)
    pairs = zip(body.inputs.texts, answer["outputs"], strict=True)
    return json_answer([_placed(text, tokens) for text, tokens in pairs])


def _placed(text: str, tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    offsets = [0, *accumulate(len(character.encode()) for character in text)]
    return [
        {
            "id": token["id"],
            "text": token["text"] if token["special"] else text[token["start"] : token["end"]],
            "special": token["special"],
            "start": None if token["special"] else offsets[token["start"]],
            "stop": None if token["special"] else offsets[token["end"]],
        }
        for token in tokens
    ]


async def decode(body: DecodeBody, call: Call) -> Response:
    """Join token ids, one list or several, to texts."""
    model = model_of_query(call)
    is_one = isinstance(body.ids, list) and not (body.ids and isinstance(body.ids[0], list))
    wanted = {
        "model": model.name,
        "ids": [body.ids] if is_one else body.ids,
        "side": "source",
        "skip_special_tokens": body.skip_special_tokens is not False,
    }
    with naming({"ids[0]": "ids"} if is_one else {}):
        return json_answer((await detokenized(check_body(wanted, DetokenizeBody), call))["texts"])


def add_routes(app: FastAPI) -> None:
    joining: tuple[ErrorCode, ...] = ("model_not_found", "response_too_large")
    splitting: tuple[ErrorCode, ...] = (*joining, "empty_input", "unsupported_parameter")
    classifying: tuple[ErrorCode, ...] = (*TASK_ERRORS, "unsupported_parameter")
    encoding: tuple[ErrorCode, ...] = (*classifying, "response_too_large")
    for path, endpoint, answer, errors in (
        ("/embed", embed, list[list[float]], encoding),
        ("/embed_all", embed_all, list[list[list[float]]], encoding),
        ("/similarity", similarity, list[float], encoding),
        ("/predict", predict, list[Prediction] | list[list[Prediction]], classifying),
        ("/tokenize", tokenize, list[list[SimpleToken]], splitting),
        ("/decode", decode, list[str], joining),
    ):
        add_route(app, "POST", path, endpoint, answer, errors=errors, error_shape=ERRORS, model_in_query=True)
