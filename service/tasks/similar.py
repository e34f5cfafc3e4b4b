"""POST /v1/similar: the tokens nearest to one, or to the solution of an analogy, by embeddings."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictInt, model_validator

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api.endpoint import ENGINE_ERRORS, Call, Endpoint
from sightline.service.api.types import ModelName
from sightline.service.body_fields import RequestBody, Texts, Word, field_error
from sightline.service.engine.request import Compared, SimilarRequest
from sightline.service.inference.results import FLOAT_BYTES
from sightline.service.tasks.tokens import Side, only_id, tokenizer_of

MIN_SQUARED_LENGTH = 1e-6  # avoids division by zero for an analogy whose vectors cancel
ANALOGY = (-1, 1, 1)  # weights of a, b and c in a : b :: c : d


class SimilarBody(RequestBody):
    model: ModelName = None
    token: Annotated[Word | None, Field(description="Find the tokens nearest to this one.")] = None
    analogy: Annotated[
        list[Word] | None, Field(min_length=3, max_length=3, description="a, b, c: find d as in a : b :: c : d.")
    ] = None
    side: Annotated[Side, Field(description="Vocabulary to search.")] = "source"
    top_k: Annotated[StrictInt, Field(description="Number of tokens to return.")] = Field(default=10, ge=1, le=100)

    EXAMPLES = ({"token": "dog"}, {"analogy": ["boy", "boys", "dog"], "top_k": 3})

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.token is None) == (self.analogy is None):
            raise field_error("invalid_parameter", "Give one of token and analogy.", "token")
        return self


@dataclass(frozen=True)
class Neighbour:
    """A token and its similarity."""

    id: Annotated[int, Field(description="Token id.")]
    text: Annotated[str, Field(description="Text of the token.")]
    score: Annotated[float, Field(description="Cosine similarity, -1 to 1.")]


@dataclass(frozen=True)
class SimilarResult:
    """The nearest tokens."""

    model: Annotated[str, Field(description="Name of the model.")]
    neighbours: Annotated[list[Neighbour], Field(description="The nearest first.")]


async def find_similar(call: Call, body: SimilarBody) -> SimilarResult:
    """Find the tokens nearest to one, or to the solution of an analogy.

    Nearness is the cosine of embeddings; the tokens of the request and special tokens are left out.
    """
    words = Texts(tuple(body.analogy)) if body.analogy else Texts.one(body.token or "")
    model = await call.model(body.model, "similar")
    admitted = await call.reserve(model, 1, units=1.0)
    tokenizer = tokenizer_of(model, body.side)
    ids = await call.tokenize(lambda: _read_tokens(tokenizer, words), words.texts)
    # For the cosines and their weighted sum.
    call.response_memory.reserve(2 * FLOAT_BYTES * len(ids) * model.manifest.limits.vocabulary)

    def convert(index: int, result: Compared) -> SimilarResult:
        scores = nearness(result.cosines, ids)[: len(tokenizer)]
        nearest = best(scores, body.top_k, tokenizer.special_ids.union(ids))
        call.record_usage(model, call.timings([result.timings]), len(ids), 0)
        return SimilarResult(model.name, [Neighbour(id_, tokenizer.name(id_), float(scores[id_])) for id_ in nearest])

    engine_request = SimilarRequest(call.request_id, tuple(ids), call.deadline, call.caller)
    (output,), _ = await admitted.submit([engine_request]).gather(convert)
    return output


def _read_tokens(tokenizer: TextTokenizer, words: Texts) -> list[int]:
    """Return the token ids of words. Each word must be one token at the start of a text."""
    field, advice = "analogy" if words.is_list else "token", "; try a more frequent word or different capitalization"
    return [
        only_id(tokenizer.encode(word, add_special_tokens=False), field, words.index(index), advice)
        for index, word in enumerate(words.texts)
    ]


def nearness(cosines: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the cosine similarity of every token to one token, or to b - a + c for three tokens.

    The analogy a : b :: c : d is solved as in Mikolov, Yih and Zweig 2013 (Linguistic Regularities
    in Continuous Space Word Representations, section 4): d is the token whose unit vector is
    nearest to b - a + c. This method, 3CosAdd in Levy and Goldberg 2014 (Linguistic Regularities in
    Sparse and Explicit Word Representations), maximizes cos(d, b) - cos(d, a) + cos(d, c).
    Therefore the cosines (N, V) of the N given tokens with all tokens are sufficient. The result is
    (V,), from -1 to 1.
    """
    weights = np.array(ANALOGY if len(ids) == len(ANALOGY) else [1], np.float32)
    sums: NDArray[np.float32] = weights @ cosines  # (V,)
    length = math.sqrt(max(float(sums[list(ids)] @ weights), MIN_SQUARED_LENGTH))  # of the weighted sum
    np.clip(sums / length, -1, 1, out=sums)  # quantised embeddings may exceed the range slightly
    return sums


def best(scores: NDArray[np.float32], count: int, excluded: Collection[int]) -> list[int]:
    """Return the ids with the highest scores, best first; ties are ordered by id."""
    ranked = np.argsort(-scores, kind="stable")[: count + len(excluded)]
    return [id_ for id_ in ranked.tolist() if id_ not in excluded][:count]


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/similar",
        find_similar,
        SimilarResult,
        errors=("model_not_found", "unsupported_task", *ENGINE_ERRORS),
    ),
)
