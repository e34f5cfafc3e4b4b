"""POST /v1/align."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from sightline.base.bundle import AlignmentStep
from sightline.service.api.endpoint import OUTPUT_ERRORS, Call, Endpoint
from sightline.service.api.types import ONE_TARGET, Inputs, ModelName, check_targets
from sightline.service.body_fields import NULL, RequestBody, field_error
from sightline.service.inference.align import AlignResult, align
from sightline.service.inference.generate import parameters_for
from sightline.service.inference.language_choice import generating_model
from sightline.service.parameters import NEUTRAL, GenerateParameters, HeadIndex, Language, given_parameters

# The languages are fields of the body, so that they can be combined with `targets`.
LANGUAGE_FIELDS = ("source_language", "target_language")


class AlignBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    targets: Annotated[
        Inputs | None,
        Field(
            description="Target of each input, instead of generated text: one string, or a list as long as `inputs`."
        ),
    ] = None
    step: Annotated[
        AlignmentStep | None,
        Field(
            description="Decoder step whose weights belong to a target token: the one that writes it, or the one that "
            "reads it. If absent, that of the model's `alignment`; `writes` with `layer`."
        ),
    ] = None
    layer: Annotated[
        HeadIndex | None,
        Field(description="Layer of the cross-attention; -1 is the last. If absent, that of the model's `alignment`."),
    ] = None
    head: Annotated[
        HeadIndex | None,
        Field(
            description="Head of the layer; -1 is the last. If absent, the mean over all heads of `layer`; without "
            "`layer`, the heads of the model's `alignment`."
        ),
    ] = None
    source_language: Language | None = None
    target_language: Language | None = None
    parameters: Annotated[
        GenerateParameters, Field(description="Generation parameters; not allowed together with `targets`.")
    ] = Field(default=NEUTRAL, json_schema_extra={"properties": {**ONE_TARGET, **dict.fromkeys(LANGUAGE_FIELDS, NULL)}})

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A dog runs."},
                {"inputs": "A dog runs.", "targets": "Ein Hund rennt.", "layer": -1},
                {"inputs": ["A dog runs.", "A cat."], "parameters": {"num_beams": 4}},
            ],
        }
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        for name in LANGUAGE_FIELDS:
            if getattr(self.parameters, name) is not None:
                message = f"parameters.{name} is not supported here: use {name} beside inputs."
                raise field_error("unsupported_parameter", message, "parameters", name)
        if self.targets is not None:
            check_targets(self.inputs, self.targets)
            if "parameters" in self.model_fields_set:
                message = "parameters cannot be combined with targets: nothing is generated."
                raise field_error("invalid_parameter", message, "parameters")
        return self


async def align_words(call: Call, body: AlignBody) -> AlignResult:
    """Align the words of each input with the words of its translation.

    Without `targets`, the model translates the inputs. Each word of the target is linked to the
    source word with the largest weight in the cross-attention of the chosen layer and heads.
    """
    if body.source_language is not None or body.target_language is not None:
        model = await generating_model(call, body.model, body.source_language, body.target_language)
    else:
        model = await call.model(body.model, default_for="generate")
    parameters = NEUTRAL
    if body.targets is None and "generate" in model.manifest.tasks:
        parameters = parameters_for(model, given_parameters(body.parameters))
    return await align(
        call,
        model,
        body.inputs,
        body.targets,
        parameters=parameters,
        step=body.step,
        layer=body.layer,
        head=body.head,
        source_language=body.source_language,
        target_language=body.target_language,
    )


ENDPOINTS = (Endpoint("POST", "/v1/align", align_words, AlignResult, errors=OUTPUT_ERRORS),)
