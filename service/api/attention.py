"""POST /v1/attention."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from service.api.endpoint import TASK_ERRORS, Endpoint
from service.api.types import ModelName
from service.fields import NULL, Text, case, refusal
from service.inference.attention import AttentionInput, AttentionResult, attention
from service.inference.call import Call
from service.parameters import AT_MOST_ONE, PARAMETER_NAMES, AttentionSelection, GenerateParameters

FIELD_NAMES = {name: f"parameters.{name}" for name in PARAMETER_NAMES}


class AttentionBody(AttentionSelection):
    model: ModelName = None
    input: Text
    target: Annotated[Text | None, Field(description="Force this text instead of what the model generates.")] = None
    parameters: GenerateParameters = Field(
        default=GenerateParameters(),
        json_schema_extra=case(
            num_return_sequences=AT_MOST_ONE,
            top_logprobs={"maximum": 0},
            return_attention={"const": False},
            target_prefix={"maxItems": 1},
        ),
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"input": "A dog runs.", "kinds": ["cross"], "reduce": "mean"},
                {"input": "A dog runs.", "target": "Ein Hund rennt.", "layers": [0], "encoding": "base64"},
                {"input": "A dog runs.", "kinds": ["cross"], "parameters": {"num_beams": 4}},
            ],
            "anyOf": [case(target=NULL), case(parameters=NULL)],
        }
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.target is not None and "parameters" in self.model_fields_set:
            message = "With a target nothing is generated: leave parameters out."
            raise refusal("invalid_parameter", message, "parameters")
        return self


async def show_attention(call: Call, body: AttentionBody) -> AttentionResult:
    """Return the attention of one input's generation, or of a given target.

    Without `target` the maps are those of the pass that generates; with it, the target is forced. A model that
    generates no text has only its encoder's maps.
    """
    call.field_names = FIELD_NAMES
    parameters = body.parameters if "parameters" in body.model_fields_set else None
    return await attention(call, AttentionInput(body.model, body.input, body, body.target, parameters))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/attention",
        show_attention,
        AttentionResult,
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
    ),
)
