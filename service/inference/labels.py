"""Scores of labels, from the outputs of a model."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sightline.service.api_errors import ApiError

ScoreFunction = Literal["softmax", "sigmoid", "none"]


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
