"""Encoding: outputs of the last encoder layer, pooled or for each token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema

from sightline.base.bundle import Manifest, VectorPooling
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import Call
from sightline.service.inference.dense import DenseLayer
from sightline.service.inference.results import BYTES_PER_NUMBER, TimingsMs, Usage, check_size, numbers
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources, read_sources
from sightline.service.parameters import Encoding

Pooling = Literal[VectorPooling, "none"]
Embeddings = Annotated[
    list[Any],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                {"type": "array", "items": {"type": "string"}},
            ]
        }
    ),
]


@dataclass(frozen=True)
class EncodeResult:
    """The embeddings of a call."""

    model: Annotated[str, Field(description="Name of the model.")]
    embeddings: Annotated[Embeddings, Field(description="One for each input; with pooling none, row-major.")]
    shapes: Annotated[
        list[tuple[int, int]] | None, Field(description="Rows and columns of each embedding; only with pooling none.")
    ]
    dimensions: Annotated[int, Field(description="Length of each vector.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


async def embed_texts(
    call: Call,
    model: ServedModel,
    inputs: Texts,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    encoding: Encoding = "float",
    truncate: bool = False,
    prompt_name: str | None = None,
    dimensions: int | None = None,
) -> EncodeResult:
    """Return the embedding of each input.

    Args:
        pooling: if None, that of the model, or "mean" if it has none.
        normalize: scale vectors to length 1; if None, as the model's settings say, but not with
            pooling "none".
        dimensions: length of a pooled vector; that of the model if None.
    """
    embedding = model.manifest.embedding
    kind: Pooling = pooling or (embedding.pooling if embedding else "mean")
    if normalize is None:
        normalize = embedding is not None and embedding.normalize and kind != "none"
    if dimensions is not None:
        _check_dimensions(dimensions, model)
    sources = await read_sources(call, model, with_prompt(model.manifest, inputs, prompt_name), truncate=truncate)
    num_numbers = model.embedding_size * len(sources)
    if kind == "none":
        num_numbers = model.hidden_size * sum(map(len, sources))
    check_size("embeddings", num_numbers, "Send fewer inputs.")
    call.response_memory.reserve(num_numbers * BYTES_PER_NUMBER[encoding])

    def convert(index: int, result: Encoded) -> NDArray[np.float32]:
        return pool(result.hidden, kind, normalize, model.dense, dimensions)

    vectors, usage, timings = await encode_sources(call, model, sources, convert)
    return EncodeResult(
        model.name,
        [numbers(vector, encoding) for vector in vectors],
        [(vector.shape[0], vector.shape[1]) for vector in vectors] if kind == "none" else None,
        vectors[0].shape[-1],
        usage,
        timings,
    )


def _check_dimensions(requested: int, model: ServedModel) -> None:
    """Check that a model was trained for this length (Kusupati et al. 2022, "Matryoshka")."""
    size, embedding = model.embedding_size, model.manifest.embedding
    trained = None if embedding is None else embedding.matryoshka
    if requested == size or (trained is not None and requested < size and (not trained or requested in trained)):
        return
    allowed = f"{size}, the dimensions of the model's vectors"
    if trained is not None:
        lengths = ", ".join(str(length) for length in trained if length < size) or f"a number from 1 to {size - 1}"
        allowed += f", or {lengths}"
    raise ApiError("unsupported_parameter", f"It must be {allowed}, got {requested}.", field="dimensions")


def with_prompt(manifest: Manifest, inputs: Texts, name: str | None) -> Texts:
    """Put a prompt before each input, by default the model's, as `sentence-transformers` does."""
    embedding = manifest.embedding
    prompts = embedding.prompts if embedding else {}
    if name is None:
        name = embedding.default_prompt if embedding else None
    if name is None:
        return inputs
    if name not in prompts:
        known = f"its prompts are {', '.join(sorted(prompts))}" if prompts else "it has no prompts; leave it out"
        message = f"{{prompt_name}} is not the name of a prompt of {manifest.name}: {known}."
        raise ApiError("unsupported_parameter", message, field="prompt_name")
    return replace(inputs, texts=tuple(prompts[name] + text for text in inputs.texts))


def pool(
    hidden: NDArray[np.float32],
    pooling: Pooling,
    normalize: bool,
    dense: Sequence[DenseLayer] = (),
    dimensions: int | None = None,
) -> NDArray[np.float32]:
    """Pool the vectors (S, M) of all tokens, without padding; pooling "none" keeps all of them.

    The layers `dense` are applied to the pooled vector (M,). Only the first `dimensions` are kept,
    before `normalize` scales a vector to Euclidean norm 1; zero vectors are not changed.
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
            pooled, dense = hidden, ()
    for layer in dense:
        pooled = layer.apply(pooled)
    pooled = pooled[..., :dimensions]
    if normalize:
        lengths = np.linalg.norm(pooled, axis=-1, keepdims=True)
        pooled = np.divide(pooled, lengths, out=np.zeros_like(pooled), where=lengths > 0)
    return pooled
