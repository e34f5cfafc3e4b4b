"""POST /v1/encode: the encoder's last layer, pooled to one vector or as a row a token."""

from typing import Any

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.responses import Response

from service.answers import EncodeAnswer
from service.calls import Call, json_answer
from service.engine.request import Encoded, EncodeRequest
from service.inputs import read_sources
from service.outputs import BYTES_PER_NUMBER, check_size, numbers
from service.routing import TASK_ERRORS, add_route
from service.schemas import EncodeBody, Pooling


async def encode(body: EncodeBody, call: Call) -> Response:
    """Encode each input to vectors.

    With pooling `none` an embedding is a row a token, row-major, and `shapes` says how many rows and columns.
    """
    return json_answer(await encoded(body, call))


async def encoded(body: EncodeBody, call: Call) -> dict[str, Any]:
    """The answer, for any door."""
    model = call.service.model(body.model, "encode")
    sources = await read_sources(call, model, body.inputs, truncate=body.truncate)
    requests = [EncodeRequest(call.record.request_id, source, call.deadline) for source in sources]
    num_numbers = model.hidden_size * (sum(map(len, sources)) if body.pooling == "none" else len(sources))
    check_size("embeddings", num_numbers, "Send fewer inputs.")
    call.response_memory.reserve(num_numbers * BYTES_PER_NUMBER[body.encoding])
    results = await call.results(call.submit(model, requests), Encoded)
    vectors = [pool(result.hidden, body.pooling, body.normalize) for result in results]
    input_tokens = sum(map(len, sources))
    timings_ms = call.account(model, [result.timings for result in results], input_tokens, 0)
    answer: dict[str, Any] = {
        "model": model.name,
        "embeddings": [numbers(one, body.encoding) for one in vectors],
        "dimensions": vectors[0].shape[-1],
        "usage": {"input_tokens": input_tokens},
        "timings_ms": timings_ms,
    }
    if body.pooling == "none":
        answer["shapes"] = [one.shape for one in vectors]
    return answer


def pool(hidden: NDArray[np.float32], pooling: Pooling, normalize: bool) -> NDArray[np.float32]:
    """One vector for all tokens, or with "none" the rows as they are.

    Args:
        hidden: (S, M), real tokens alone.
        pooling: how.
        normalize: give each vector Euclidean length 1; a vector of zeros stays as it is.

    Returns:
        (M,), or (S, M) with pooling "none".
    """
    pooled: NDArray[np.float32]
    match pooling:
        case "mean":
            pooled = hidden.mean(axis=0)
        case "max":
            pooled = hidden.max(axis=0)
        case "first":
            pooled = hidden[0]
        case "last":
            pooled = hidden[-1]
        case "none":
            pooled = hidden
    if normalize:
        lengths = np.linalg.norm(pooled, axis=-1, keepdims=True)
        pooled = np.divide(pooled, lengths, out=np.zeros_like(pooled), where=lengths > 0)
    return pooled


def add_routes(app: FastAPI) -> None:
    add_route(app, "POST", "/v1/encode", encode, EncodeAnswer, errors=(*TASK_ERRORS, "response_too_large"))
