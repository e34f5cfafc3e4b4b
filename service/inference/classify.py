"""Classification of texts or of pairs of texts: a score of each label."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sightline.base.text.tokenizer import Offsets
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.engine.request import Encoded
from sightline.service.inference.call import Call
from sightline.service.inference.maps import AttentionMap, MapWriter
from sightline.service.inference.results import Outputs
from sightline.service.inference.service import ServedModel
from sightline.service.inference.source_encoding import encode_sources, read_sources
from sightline.service.parameters import AttentionSelection

ScoreFunction = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True)
class LabelScore:
    """A label and its score."""

    label: Annotated[str, Field(description="Name of the label.")]
    score: Annotated[float, Field(description="Probability of the label; with `label_kind` classes, they sum to 1.")]


@dataclass(frozen=True)
class ClassifyOutput:
    """The labels of one input."""

    index: Annotated[int, Field(description="Index of the input.")]
    labels: Annotated[list[LabelScore], Field(description="All labels, the highest score first.")]
    source_tokens: Annotated[list[str] | None, Field(description="Only with return_attention.")]
    source_offsets: Annotated[Offsets | None, Field(description="Only with return_attention.")]
    maps: Annotated[list[AttentionMap] | None, Field(description="Only with return_attention.")]


@dataclass(frozen=True)
class ClassifyResult(Outputs):
    """The labels of a call's inputs."""

    outputs: Annotated[list[ClassifyOutput], Field(description="One output for each input, in order.")]


async def classify(
    call: Call,
    model: ServedModel,
    inputs: Texts,
    *,
    return_attention: AttentionSelection | None = None,
    truncate: bool = False,
    raw_scores: bool = False,
) -> ClassifyResult:
    """Return the score of each label for each input; `raw_scores` are logits, not probabilities."""
    function = function_of(model.manifest.label_kind, raw_scores)
    if model.manifest.pair_template is not None and None in (inputs.second_texts or (None,)):
        message = f"It must have pairs of texts for {model.name}: [query, document]."
        raise ApiError("unsupported_parameter", message, field="inputs")
    maps = MapWriter(call, model, return_attention) if return_attention else None
    sources = await read_sources(call, model, inputs, truncate=truncate)
    if maps:
        await maps.read_offsets(call, inputs, sources)

    def convert(index: int, result: Encoded) -> ClassifyOutput:
        assert result.label_scores is not None
        labels = rank_scores(model.manifest.labels, apply_function(result.label_scores, function))
        if maps is None:
            return ClassifyOutput(index, labels, None, None, None)
        attention = maps.write_encoded(index, result)
        return ClassifyOutput(index, labels, attention.source_tokens, attention.source_offsets, attention.maps)

    return ClassifyResult(
        model.name, *await encode_sources(call, model, sources, convert, return_labels=True, maps=maps)
    )


def function_of(label_kind: str, raw_scores: bool) -> ScoreFunction:
    """Return the function that turns the label output of a model into scores."""
    if label_kind in ("classes", "tokens"):
        if raw_scores:
            message = "{raw_scores} must be false: this model returns log-probabilities, not logits."
            raise ApiError("unsupported_parameter", message, field="raw_scores")
        return "softmax"
    return "none" if raw_scores else "sigmoid"


def apply_function(values: NDArray[np.float32], function: ScoreFunction) -> NDArray[np.float64]:
    """Return scores (..., C) of logits or log-probabilities (..., C), computed in float64."""
    wide = values.astype(np.float64)
    if function == "none":
        return wide
    if function == "sigmoid":
        # exp(-|x|) cannot overflow.
        small = np.exp(-np.abs(wide))
        scores: NDArray[np.float64] = np.where(wide >= 0, 1.0, small) / (1.0 + small)
        return scores
    scores = np.exp(wide - wide.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)  # rounding of the graph leaves a small difference from 1
    return scores


def rank_scores(labels: Sequence[str], scores: NDArray[np.float64]) -> list[LabelScore]:
    """Return labels with their scores, the highest first; ties keep the order of `labels`."""
    return [LabelScore(labels[index], float(scores[index])) for index in np.argsort(-scores, kind="stable")]
