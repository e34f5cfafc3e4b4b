"""Sparse vectors: weights of the tokens of the vocabulary for a text, as SPLADE computes them."""

import numpy as np
from numpy.typing import NDArray

from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import Call
from sightline.service.inference.results import FLOAT_BYTES
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources, read_sources
from sightline.service.tasks.encode import with_prompt

BYTES_PER_WEIGHT = 320  # of a response: an object, its numbers, and their JSON
SparseVector = tuple[NDArray[np.int64], NDArray[np.float32]]  # ids of tokens in ascending order, and their weights


async def embed_sparse(
    call: Call, model: ServedModel, inputs: Texts, *, truncate: bool, prompt_name: str | None
) -> list[SparseVector]:
    """Return the sparse vector of each input.

    The weight of a token is the maximum of log(1 + max(0, x)) over all positions of the text, with
    the logit x of the token there (Formal et al. 2021, "SPLADE v2", equations 1 and 6). Tokens
    whose weight is 0 are left out.
    """
    admitted, sources = await read_sources(
        call, model, with_prompt(model.manifest, inputs, prompt_name), truncate=truncate
    )
    call.response_memory.reserve(2 * FLOAT_BYTES * model.manifest.limits.vocabulary * len(sources))

    def convert(index: int, result: Encoded) -> SparseVector:
        assert result.largest is not None
        return sparse_vector(result.largest)

    vectors, _, _ = await encode_sources(admitted, sources, convert, return_largest=True)
    call.response_memory.reserve(BYTES_PER_WEIGHT * sum(len(ids) for ids, _ in vectors))
    return vectors


def sparse_vector(largest: NDArray[np.float32]) -> SparseVector:
    """Return the sparse vector of a text with these largest logits (V,)."""
    weights = np.log1p(np.maximum(largest, 0))  # it grows with the logit, so that the maximum comes first
    (ids,) = weights.nonzero()
    return ids, weights[ids]
