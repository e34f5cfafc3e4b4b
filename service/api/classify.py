"""POST /v1/classify."""

from typing import Annotated

from pydantic import ConfigDict, Field

from service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from service.api.types import INPUTS_OR_PAIRS, ModelName, Truncate
from service.fields import RequestBody, TextsOrPairs
from service.inference.classify import ClassifyResult, classify
from service.parameters import ReturnAttention


class ClassifyBody(RequestBody):
    model: ModelName = None
    inputs: Annotated[TextsOrPairs, Field(description=INPUTS_OR_PAIRS)]
    return_attention: ReturnAttention = Field(
        default=None, description="The encoder's attention maps of each input; true returns all of them."
    )
    truncate: Truncate = False

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "sst2-sentiment", "inputs": ["a stirring , funny film .", "a long string of cliches ."]},
                {
                    "model": "sst2-sentiment",
                    "inputs": "a stirring , funny film .",
                    "return_attention": {"layers": [0], "reduce": "mean"},
                },
                {"model": "sst2-sentiment", "inputs": [["a stirring , funny film .", "a long string of cliches ."]]},
            ]
        }
    )


async def classify_texts(call: Call, body: ClassifyBody) -> ClassifyResult:
    """Return the probability of each label for each input, the most probable label first.

    The scores of an input sum to 1 if the labels exclude each other (`label_kind` classes);
    otherwise each label has a probability of its own (`label_kind` independent).
    """
    model = await call.model(body.model, "classify")
    return await classify(call, model, body.inputs, return_attention=body.return_attention, truncate=body.truncate)


ENDPOINTS = (Endpoint("POST", "/v1/classify", classify_texts, ClassifyResult, errors=OUTPUT_ERRORS),)
