"""POST /v1/similar: the tokens nearest to one, or to what completes an analogy, by the model's own embeddings."""

import math
from collections.abc import Collection, Sequence

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.responses import Response

from service.answers import SimilarAnswer
from service.calls import Call, json_answer
from service.engine.request import Compared, SimilarRequest
from service.errors import ApiError, ErrorCode
from service.routes.tokens import tokenizer_of
from service.routing import ENGINE_ERRORS, add_route
from service.schemas import SimilarBody
from service.tokenizer import TextTokenizer

SMALLEST = 1e-6  # squared length of a sum that has a direction
ANALOGY = (-1, 1, 1)  # weights of a, b and c in a : b :: c : d


async def similar(body: SimilarBody, call: Call) -> Response:
    """Find the tokens nearest to one, or to what completes an analogy.

    Nearness is the cosine of embeddings; what was asked with and special tokens are left out.
    """
    model = call.service.model(body.model, "similar")
    call.reserve(model, 1, units=1.0)
    tokenizer = tokenizer_of(model, body.side)
    with call.tokenizing():
        if body.token is not None:
            ids = [read_token(tokenizer, body.token, "token")]
        else:
            words = enumerate(body.analogy or [])
            ids = [read_token(tokenizer, word, f"analogy[{place}]") for place, word in words]
    request = SimilarRequest(call.record.request_id, tuple(ids), call.deadline)
    (result,) = await call.results(call.submit(model, [request]), Compared)
    scores = nearness(result.cosines, ids)[: len(tokenizer)]
    nearest = best(scores, body.top_k, tokenizer.special_ids.union(ids))
    call.account(model, [result.timings], len(ids), 0)
    neighbours = [{"id": id_, "text": tokenizer.name(id_), "score": float(scores[id_])} for id_ in nearest]
    return json_answer({"model": model.name, "neighbours": neighbours})


def read_token(tokenizer: TextTokenizer, word: str, param: str) -> int:
    """The id of a string that is one token where a text begins with it.

    Raises:
        ApiError: it is several.
    """
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        message = (
            f"It is {len(ids)} tokens of this model, and must be one. POST /v1/tokenize shows them; "
            "try a more frequent word, or other capitals."
        )
        raise ApiError("invalid_parameter", message, param=param)
    return ids[0]


def nearness(cosines: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
    """The cosine of every token's embedding with that of one token, or with b - a + c of three.

    The analogy a : b :: c : d is solved as by Mikolov, Yih and Zweig 2013 (Linguistic Regularities in Continuous Space
    Word Representations, section 4): of unit vectors, d is nearest to b - a + c. Levy and Goldberg 2014 (Linguistic
    Regularities in Sparse and Explicit Word Representations) call it 3CosAdd: it is the largest
    cos(d, b) - cos(d, a) + cos(d, c), and so cosines are all that is needed.

    Args:
        cosines: (N, V), of the given tokens with all.
        ids: of the given tokens, one or three.

    Returns:
        (V,), from -1 to 1.
    """
    weights = np.array(ANALOGY if len(ids) == len(ANALOGY) else [1], np.float32)
    sums: NDArray[np.float32] = weights @ cosines  # (V,)
    length = math.sqrt(max(float(sums[list(ids)] @ weights), SMALLEST))  # of the weighted sum
    np.clip(sums / length, -1, 1, out=sums)  # with quantised embeddings it may lie a little beyond
    return sums


def best(scores: NDArray[np.float32], count: int, excluded: Collection[int]) -> list[int]:
    """The ids of the highest scores, the highest first; of equals the lower id."""
    ranked = np.argsort(-scores, kind="stable")[: count + len(excluded)]
    return [id_ for id_ in ranked.tolist() if id_ not in excluded][:count]


def add_routes(app: FastAPI) -> None:
    errors: tuple[ErrorCode, ...] = ("model_not_found", "unsupported_task", *ENGINE_ERRORS)
    add_route(app, "POST", "/v1/similar", similar, SimilarAnswer, errors=errors)
