"""POST /v1/attention."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from service.api.endpoint import TASK_ERRORS, Endpoint
from service.api.types import SAME_FORM, Inputs, ModelName, check_targets
from service.fields import NULL, field_error, object_schema
from service.inference.attention import AttentionInput, AttentionResult, attention
from service.inference.call import Call
from service.inference.generate import parameters_for
from service.inference.languages import generating_model
from service.parameters import AT_MOST_ONE, PARAMETER_NAMES, AttentionSelection, GenerateParameters, GivenParameters

FIELD_NAMES = {name: f"parameters.{name}" for name in PARAMETER_NAMES}


class AttentionBody(AttentionSelection, GivenParameters):
    model: ModelName = None
    inputs: Inputs
    targets: Annotated[
        Inputs | None,
        Field(
            description="Forced target of each input, instead of generated text: one string, or a list as long as "
            "`inputs`."
        ),
    ] = None
    parameters: Annotated[
        GenerateParameters, Field(description="Generation parameters; not allowed together with `targets`.")
    ] = Field(
        default=GenerateParameters(),
        json_schema_extra=object_schema(
            num_return_sequences=AT_MOST_ONE,
            top_logprobs={"maximum": 0},
            return_attention={"const": False},
            split_sentences={"const": False},
        ),
    )

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A dog runs.", "kinds": ["cross"], "reduce": "mean"},
                {"inputs": "A dog runs.", "targets": "Ein Hund rennt.", "layers": [0], "encoding": "base64"},
                {"inputs": ["A dog runs.", "A cat."], "kinds": ["cross"], "parameters": {"num_beams": 4}},
            ],
            "allOf": [
                {"anyOf": [object_schema(targets=NULL), *SAME_FORM]},
                {"anyOf": [object_schema(targets=NULL), object_schema(parameters=NULL)]},
            ],
        }
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if self.targets is not None:
            check_targets(self.inputs, self.targets)
            if "parameters" in self.model_fields_set:
                message = "parameters cannot be combined with targets: nothing is generated."
                raise field_error("invalid_parameter", message, "parameters")
        return self


async def show_attention(call: Call, body: AttentionBody) -> AttentionResult:
    """Return the attention of each input's generation, or of a given target.

    Without `targets` the maps are those of the pass that generates; with them, the targets are
    forced. A model that generates no text has only its encoder's maps.
    """
    call.field_names = FIELD_NAMES
    name, parameters = body.model, None
    if "parameters" in body.model_fields_set:
        parameters = body.parameters
        if parameters.source_language is not None or parameters.target_language is not None:
            name = (await generating_model(call, name, parameters.source_language, parameters.target_language)).name
        model = await call.model(name, "attention")
        if "generate" in model.manifest.tasks:
            parameters = parameters_for(model, body.given_parameters)
    return await attention(call, AttentionInput(name, body.inputs, body, body.targets, parameters))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/attention",
        show_attention,
        AttentionResult,
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
    ),
)
