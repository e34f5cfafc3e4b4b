"""Classification: the probability of each label of each input."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from service.engine.request import Encoded, EncodeRequest
from service.fields import Texts
from service.inference.call import Call
from service.inference.maps import AttentionMap, MapWriter
from service.inference.results import FLOAT_BYTES, TimingsMs, Usage
from service.parameters import AttentionSelection


@dataclass(frozen=True)
class ClassifyInput:
    """A request for label probabilities."""

    model: str | None
    inputs: Texts
    return_attention: AttentionSelection | None = None
    truncate: bool = False


@dataclass(frozen=True)
class LabelScore:
    """A label with its probability."""

    label: str
    score: Annotated[float, Field(description="Its probability; those of all labels sum to 1.")]


@dataclass(frozen=True)
class ClassifyOutput:
    """The labels of one input."""

    index: int
    labels: Annotated[list[LabelScore], Field(description="All labels, the most probable first.")]
    source_tokens: Annotated[list[str] | None, Field(description="Only with return_attention.")]
    maps: Annotated[list[AttentionMap] | None, Field(description="Only with return_attention.")]


@dataclass(frozen=True)
class ClassifyResult:
    """The labels of a call's inputs."""

    model: str
    outputs: list[ClassifyOutput]
    usage: Usage
    timings_ms: TimingsMs


async def classify(call: Call, request: ClassifyInput) -> ClassifyResult:
    """Return how probable each label of each input is.

    Raises:
        ApiError: the request is not allowed, does not fit, or fails.
        ClientGoneError: the client has left.
    """
    model = call.model(request.model, "classify")
    maps = MapWriter(call, model, request.return_attention) if request.return_attention else None
    kinds = maps.kinds if maps else frozenset[str]()
    sources = await call.read_sources(model, request.inputs, truncate=request.truncate)
    requests = [
        EncodeRequest(call.request_id, source, call.deadline, wants_labels=True, attention=kinds) for source in sources
    ]
    if maps:
        maps.check(requests)
    call.response_memory.reserve(FLOAT_BYTES * model.hidden_size * sum(map(len, sources)))
    results: list[Encoded] = []

    def convert(index: int, result: Encoded) -> ClassifyOutput:
        results.append(result)
        assert result.label_logprobs is not None
        labels = rank_labels(model.manifest.labels, result.label_logprobs)
        if maps is None:
            return ClassifyOutput(index, labels, None, None)
        found = maps.write_encoded(requests[index], result)
        return ClassifyOutput(index, labels, found.source_tokens, found.maps)

    outputs = await call.gather(model, requests, Encoded, convert)
    usage = Usage(sum(map(len, sources)), 0)
    timings = call.timings(results)
    call.record_usage(model, timings, usage.input_tokens, 0)
    return ClassifyResult(model.name, outputs, usage, timings)


def rank_labels(labels: Sequence[str], logprobs: NDArray[np.float32]) -> list[LabelScore]:
    """Return every label with its probability, the most probable first; of equals the first of the model's."""
    scores = np.exp(logprobs.astype(np.float64))
    scores /= scores.sum()  # float32 and other precisions leave a small difference from 1
    return [LabelScore(labels[place], float(scores[place])) for place in np.argsort(-scores, kind="stable")]
