"""POST /v1/classify."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import (
    INPUTS_OR_PAIRS,
    CandidateLabels,
    HypothesisTemplate,
    ModelName,
    MultiLabel,
    Truncate,
)
from sightline.service.body_fields import RequestBody, TextsOrPairs, field_error
from sightline.service.inference.classify import ClassifyResult, classify
from sightline.service.inference.zero_shot import DEFAULT_TEMPLATE, classify_zero_shot
from sightline.service.parameters import ReturnAttention


class ClassifyBody(RequestBody):
    model: ModelName = None
    inputs: Annotated[TextsOrPairs, Field(description=INPUTS_OR_PAIRS)]
    return_attention: ReturnAttention = Field(
        default=None, description="The encoder's attention maps of each input; true returns all of them."
    )
    truncate: Truncate = False
    candidate_labels: CandidateLabels | None = None
    hypothesis_template: HypothesisTemplate | None = None
    multi_label: MultiLabel | None = None

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        """Check that fields with an effect on other outputs are absent."""
        if self.candidate_labels is None:
            for name in ("hypothesis_template", "multi_label"):
                if getattr(self, name) is not None:
                    raise field_error("unsupported_parameter", "It has an effect only with candidate_labels.", name)
        elif self.return_attention:
            message = (
                "It must be absent with candidate_labels; classify pairs, [text, hypothesis], to see their attention."
            )
            raise field_error("unsupported_parameter", message, "return_attention")
        elif self.inputs.second_texts is not None:
            message = "It must have no pairs of texts with candidate_labels, which make pairs of their own."
            raise field_error("invalid_parameter", message, "inputs")
        return self

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "sst2-sentiment", "inputs": ["a stirring , funny film .", "a long string of cliches ."]},
                {
                    "model": "sst2-sentiment",
                    "inputs": "a stirring , funny film .",
                    "return_attention": {"layers": [0], "reduce": "mean"},
                },
                {
                    "model": "nli",
                    "inputs": "The train was late again.",
                    "candidate_labels": ["travel", "sports", "cooking"],
                },
                {"model": "sst2-sentiment", "inputs": [["a stirring , funny film .", "a long string of cliches ."]]},
            ],
        }
    )


async def classify_texts(call: Call, body: ClassifyBody) -> ClassifyResult:
    """Return the probability of each label for each input, the most probable label first.

    The scores of an input sum to 1 if the labels exclude each other (`label_kind` classes);
    otherwise each label has a probability of its own (`label_kind` independent).

    With `candidate_labels`, the labels are those of the request (zero-shot classification). The
    model must be one for natural language inference, which has a label of entailment.
    """
    if body.candidate_labels is not None:
        return await classify_zero_shot(
            call,
            await call.model(body.model, "classify", "zero-shot"),
            body.inputs,
            body.candidate_labels,
            template=body.hypothesis_template or DEFAULT_TEMPLATE,
            multi_label=bool(body.multi_label),
            truncate=body.truncate,
        )
    model = await call.model(body.model, "classify")
    return await classify(call, model, body.inputs, return_attention=body.return_attention, truncate=body.truncate)


ENDPOINTS = (Endpoint("POST", "/v1/classify", classify_texts, ClassifyResult, errors=OUTPUT_ERRORS),)
