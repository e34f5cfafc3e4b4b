"""POST /v1/score."""

from typing import Self

from pydantic import ConfigDict, model_validator

from service.api.endpoint import TASK_ERRORS, Endpoint
from service.api.types import Inputs, ModelName
from service.fields import RequestBody, case, refusal
from service.inference.call import Call
from service.inference.score import ScoreInput, ScoreResult, score
from service.parameters import TopLogprobs


class ScoreBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    targets: Inputs
    top_logprobs: TopLogprobs = 0

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A dog runs.", "targets": "Ein Hund rennt."},
                {"inputs": ["A dog.", "A cat."], "targets": ["Ein Hund.", "Ein Hund."], "top_logprobs": 3},
            ],
            "anyOf": [case(inputs={"type": kind}, targets={"type": kind}) for kind in ("string", "array")],
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        inputs, targets = self.inputs, self.targets
        if (inputs.is_list, len(inputs)) != (targets.is_list, len(targets)):
            message = "inputs and targets are both one string, or both lists of the same length."
            raise refusal("invalid_parameter", message, "targets")
        return self


async def score_targets(call: Call, body: ScoreBody) -> ScoreResult:
    """Score the target of each input.

    Each target gets its end token; its score is the sum of the log-probabilities of all its tokens.
    """
    return await score(call, ScoreInput(body.model, body.inputs, body.targets, body.top_logprobs))


ENDPOINTS = (Endpoint("POST", "/v1/score", score_targets, ScoreResult, errors=TASK_ERRORS),)
