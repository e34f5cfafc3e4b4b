"""POST /v1/score."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from sightline.service.api.endpoint import PARAMETER_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName, check_targets
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import RequestBody
from sightline.service.inference.language_choice import generating_model
from sightline.service.inference.score import ScoreResult, score
from sightline.service.parameters import HiddenSourceTokens, Language, TopLogprobs


class ScoreBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    targets: Annotated[
        Inputs, Field(description="Text to score for each input: one string, or a list as long as `inputs`.")
    ]
    top_logprobs: TopLogprobs = 0
    source_language: Language | None = None
    target_language: Language | None = None
    hidden_source_tokens: HiddenSourceTokens = ()

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A dog runs.", "targets": "Ein Hund rennt."},
                {"inputs": ["A dog.", "A cat."], "targets": ["Ein Hund.", "Ein Hund."], "top_logprobs": 3},
            ],
        }
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        check_targets(self.inputs, self.targets)
        return self


async def score_targets(call: Call, body: ScoreBody) -> ScoreResult:
    """Score the target of each input.

    Each target gets its end token; its score is the sum of the log-probabilities of all its tokens.
    """
    try:
        model = await generating_model(call, body.model, body.source_language, body.target_language)
    except ApiError as error:
        if error.code != "unsupported_task":
            raise
        message = error.text.replace("do the task generate", "score targets, which needs the task generate")
        raise ApiError(error.code, message, field=error.field) from None
    return await score(
        call,
        model,
        body.inputs,
        body.targets,
        top_logprobs=body.top_logprobs,
        source_language=body.source_language,
        target_language=body.target_language,
        hidden_source_tokens=body.hidden_source_tokens,
    )


ENDPOINTS = (Endpoint("POST", "/v1/score", score_targets, ScoreResult, errors=PARAMETER_ERRORS),)
