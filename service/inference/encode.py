"""Encoding: outputs of the last encoder layer, pooled or for each token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema

from service.bundle import Manifest
from service.engine.request import Encoded, EncodeRequest
from service.errors import ApiError
from service.fields import Texts
from service.inference.call import Call
from service.inference.dense import DenseLayer
from service.inference.results import BYTES_PER_NUMBER, FLOAT_BYTES, TimingsMs, Usage, check_size, numbers
from service.parameters import Encoding

Pooling = Literal["mean", "first", "last", "max", "none"]
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
class EncodeInput:
    """A request for embeddings."""

    model: str | None
    inputs: Texts
    pooling: Pooling | None = None  # the model's, or "mean", if None
    normalize: bool | None = None  # the model's, or False, if None; False if `pooling` is "none"
    encoding: Encoding = "float"
    truncate: bool = False
    prompt_name: str | None = None  # the model's default prompt, if it has one, if None


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


async def encode(call: Call, request: EncodeInput) -> EncodeResult:
    """Return the embedding of each input.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    model = call.model(request.model, "encode")
    pooling, normalize = pooling_of(model.manifest, request)
    inputs = with_prompt(model.manifest, request.inputs, request.prompt_name)
    sources = await call.read_sources(model, inputs, truncate=request.truncate)
    requests = [EncodeRequest(call.request_id, source, call.deadline) for source in sources]
    input_tokens = sum(map(len, sources))
    num_numbers = model.hidden_size * input_tokens if pooling == "none" else model.embedding_size * len(sources)
    check_size("embeddings", num_numbers, "Send fewer inputs.")
    hidden_bytes = FLOAT_BYTES * model.hidden_size * input_tokens
    call.response_memory.reserve(hidden_bytes + num_numbers * BYTES_PER_NUMBER[request.encoding])
    results: list[Encoded] = []

    def convert(index: int, result: Encoded) -> NDArray[np.float32]:
        results.append(result)
        return pool(result.hidden, pooling, normalize, model.dense)

    vectors = await call.gather(model, requests, Encoded, convert)
    timings = call.timings(results)
    call.record_usage(model, timings, input_tokens, 0)
    return EncodeResult(
        model.name,
        [numbers(one, request.encoding) for one in vectors],
        [(one.shape[0], one.shape[1]) for one in vectors] if pooling == "none" else None,
        vectors[0].shape[-1],
        Usage(input_tokens, 0),
        timings,
    )


def pooling_of(manifest: Manifest, request: EncodeInput) -> tuple[Pooling, bool]:
    """Return the pooling of a request, and True if its vectors are normalized.

    A request overrides the model's own settings.
    """
    embedding = manifest.embedding
    pooling: Pooling = request.pooling or (embedding.pooling if embedding else "mean")
    if request.normalize is not None:
        return pooling, request.normalize
    return pooling, embedding is not None and embedding.normalize and pooling != "none"


def with_prompt(manifest: Manifest, inputs: Texts, name: str | None) -> Texts:
    """Put a prompt of the model before each input, as `sentence-transformers` does.

    Raises:
        ApiError: `unsupported_parameter` if the model has no prompt of this name.
    """
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
    hidden: NDArray[np.float32], pooling: Pooling, normalize: bool, dense: Sequence[DenseLayer] = ()
) -> NDArray[np.float32]:
    """Pool the vectors of all tokens to one vector.

    Args:
        hidden: (S, M), without padding.
        pooling: kind of pooling; "none" keeps the vectors of all tokens.
        normalize: scale each vector to Euclidean norm 1; zero vectors are not changed.
        dense: layers that are applied to the pooled vector; not with pooling "none".

    Returns:
        (M,) or the outputs of the last layer, or (S, M) with pooling "none".
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
    if normalize:
        lengths = np.linalg.norm(pooled, axis=-1, keepdims=True)
        pooled = np.divide(pooled, lengths, out=np.zeros_like(pooled), where=lengths > 0)
    return pooled
