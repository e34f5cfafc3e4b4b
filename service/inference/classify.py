"""Classification: the probability of each label for each input."""

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
    """A label and its probability."""

    label: Annotated[str, Field(description="Name of the label.")]
    score: Annotated[float, Field(description="Its probability; those of all labels sum to 1.")]


@dataclass(frozen=True)
class ClassifyOutput:
    """The labels of one input."""

    index: Annotated[int, Field(description="Index of the input.")]
    labels: Annotated[list[LabelScore], Field(description="All labels, the most probable first.")]
    source_tokens: Annotated[list[str] | None, Field(description="Only with return_attention.")]
    maps: Annotated[list[AttentionMap] | None, Field(description="Only with return_attention.")]


@dataclass(frozen=True)
class ClassifyResult:
    """The labels of a call's inputs."""

    model: Annotated[str, Field(description="Name of the model.")]
    outputs: Annotated[list[ClassifyOutput], Field(description="One output for each input, in order.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


async def classify(call: Call, request: ClassifyInput) -> ClassifyResult:
    """Return the probability of each label for each input.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    model = call.model(request.model, "classify")
    maps = MapWriter(call, model, request.return_attention) if request.return_attention else None
    kinds = maps.kinds if maps else frozenset[str]()
    sources = await call.read_sources(model, request.inputs, truncate=request.truncate)
    requests = [
        EncodeRequest(call.request_id, source, call.deadline, return_labels=True, attention=kinds) for source in sources
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
    """Return all labels by descending probability; ties keep the order of `labels`."""
    scores = np.exp(logprobs.astype(np.float64))
    scores /= scores.sum()  # rounding of the graph leaves a small difference from 1
    return [LabelScore(labels[index], float(scores[index])) for index in np.argsort(-scores, kind="stable")]
