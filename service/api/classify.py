"""POST /v1/classify."""

from pydantic import ConfigDict, Field

from service.api.endpoint import TASK_ERRORS, Endpoint
from service.api.types import Inputs, ModelName, Truncate
from service.fields import RequestBody
from service.inference.call import Call
from service.inference.classify import ClassifyInput, ClassifyResult, classify
from service.parameters import ReturnAttention

FIELD_NAMES = {name: f"return_attention.{name}" for name in ("kinds", "layers", "heads")}


class ClassifyBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
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
            ]
        }
    )


async def classify_texts(call: Call, body: ClassifyBody) -> ClassifyResult:
    """Return how probable each label of each input is.

    The scores of an input sum to 1; the most probable label comes first.
    """
    call.field_names = FIELD_NAMES
    return await classify(call, ClassifyInput(body.model, body.inputs, body.return_attention, body.truncate))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/classify",
        classify_texts,
        ClassifyResult,
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
    ),
)
