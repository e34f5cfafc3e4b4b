"""POST /v1/encode: outputs of the last encoder layer, pooled or for each token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema

from sightline.base.bundle import Manifest, VectorPooling
from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName, PromptName, Truncate
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody, Texts
from sightline.service.engine.request import Encoded
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


class EncodeBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    pooling: Annotated[
        Pooling | None,
        Field(
            description="Reduction of the token vectors to one vector; `none` returns a vector for each token. The "
            "model's own if absent, or `mean` if it has none."
        ),
    ] = None
    normalize: bool | None = Field(
        default=None,
        description="Give each vector length 1. If absent, the model's own setting, or false if it has none or with "
        "pooling `none`.",
    )
    prompt_name: PromptName = None
    encoding: Annotated[
        Encoding, Field(description="Encoding of the vectors: numbers, or base64 of little-endian float32.")
    ] = "float"
    truncate: Truncate = False

    EXAMPLES = ({"inputs": ["A dog runs."], "pooling": "mean", "normalize": True},)


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


async def encode_texts(call: Call, body: EncodeBody) -> EncodeResult:
    """Encode each input to vectors.

    With pooling `none` an embedding has a row for each token, row-major, and `shapes` has the
    numbers of rows and columns.
    """
    return await encode(call, body)


async def encode(call: Call, body: EncodeBody, dimensions: int | None = None) -> EncodeResult:
    """Return the embedding of each input.

    `dimensions` is the length of a pooled vector; that of the model if None.
    """
    model = await call.model(body.model, "encode")
    embedding = model.manifest.embedding
    pooling: Pooling = body.pooling or (embedding.pooling if embedding else "mean")
    normalize = body.normalize
    if normalize is None:
        normalize = embedding is not None and embedding.normalize and pooling != "none"
    if dimensions is not None:
        _check_dimensions(dimensions, model)
    texts = with_prompt(model.manifest, body.inputs, body.prompt_name)
    admitted, sources = await read_sources(call, model, texts, truncate=body.truncate)
    num_numbers = model.embedding_size * len(sources)
    if pooling == "none":
        num_numbers = model.hidden_size * sum(map(len, sources))
    check_size("embeddings", num_numbers, "Send fewer inputs.")
    call.response_memory.reserve(num_numbers * BYTES_PER_NUMBER[body.encoding])

    def convert(index: int, result: Encoded) -> NDArray[np.float32]:
        return pool(result.hidden, pooling, normalize, model.dense, dimensions)

    vectors, usage, timings = await encode_sources(admitted, sources, convert)
    return EncodeResult(
        model.name,
        [numbers(vector, body.encoding) for vector in vectors],
        [(vector.shape[0], vector.shape[1]) for vector in vectors] if pooling == "none" else None,
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


ENDPOINTS = (Endpoint("POST", "/v1/encode", encode_texts, EncodeResult, errors=OUTPUT_ERRORS),)
