"""POST /v1/attention."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from sightline.service.api.endpoint import JSON, OUTPUT_ERRORS, SVG, Call, Endpoint, Headers, Raw, prefers
from sightline.service.api.messages import Messages, check_dialogue, dialogue_of
from sightline.service.api.types import INPUTS_OR_PAIRS, ONE_TARGET, Inputs, ModelName, check_targets
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts, TextsOrPairs, field_error
from sightline.service.drawing import View
from sightline.service.inference.attention import TARGET_PARAMETERS, AttentionResult, attention
from sightline.service.inference.generate import parameters_for
from sightline.service.inference.language_choice import generating_model
from sightline.service.inference.picture import draw, selection_to_draw
from sightline.service.parameters import NEUTRAL, AttentionSelection, GenerateParameters, given_parameters


class AttentionBody(AttentionSelection):
    model: ModelName = None
    inputs: Annotated[
        TextsOrPairs | None,
        Field(
            description=f"{INPUTS_OR_PAIRS} Models that generate text read no pairs. Required, unless `messages` are "
            "given."
        ),
    ] = None
    messages: Messages | None = Field(
        default=None, description="Dialogue with a chat model, instead of `inputs`; as in `POST /v1/chat/completions`."
    )
    targets: Annotated[
        Inputs | None,
        Field(
            description="Forced target of each input, instead of generated text: one string, or a list as long as "
            "`inputs`; one string for `messages`."
        ),
    ] = None
    parameters: Annotated[
        GenerateParameters,
        Field(description=f"Generation parameters; together with `targets` only {', '.join(TARGET_PARAMETERS)}."),
    ] = Field(default=NEUTRAL, json_schema_extra={"properties": ONE_TARGET})

    draw: View | None = Field(
        default=None,
        description="Return a picture of the only input as SVG, as does `Accept: image/svg+xml`: a heat map (the "
        "default), an alignment, or small maps of all heads.",
    )

    EXAMPLES = (
        {"inputs": "A dog runs.", "kinds": ["cross"], "reduce": "mean"},
        {"inputs": "A dog runs.", "targets": "Ein Hund rennt.", "layers": [0], "encoding": "base64"},
        {"inputs": ["A dog runs.", "A cat."], "kinds": ["cross"], "parameters": {"num_beams": 4}},
        {"inputs": "A dog runs.", "kinds": ["cross"], "parameters": {"hidden_source_tokens": [1]}},
        {"inputs": "A dog runs.", "units": "words", "draw": "alignment"},
        {
            "model": "smalltalk-chat-gatt",
            "messages": [{"role": "user", "content": "Hello!"}],
            "layers": [-1],
            "prompt_rows": True,
        },
    )

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.inputs is None and self.messages is None:
            raise field_error("invalid_parameter", "It is required, unless messages are given.", "inputs")
        if self.inputs is not None and self.messages is not None:
            text = "inputs and messages cannot be combined; leave out one of them."
            raise field_error("invalid_parameter", text, "inputs")
        if self.messages is not None:
            check_dialogue(self.messages)
            if self.targets is not None and self.targets.is_list:
                raise field_error("invalid_parameter", "It must be one string for messages.", "targets")
        elif self.inputs is not None and self.targets is not None:
            check_targets(self.inputs, self.targets)
        return self


async def show_attention(call: Call, body: AttentionBody, headers: Headers) -> AttentionResult | Raw:
    """Return the attention of each input's generation, or of a given target.

    Without `targets` the maps are those of the pass that generates; with them, the targets are
    forced. A model that generates no text has only its encoder's maps. A chat model also reads
    `messages` instead of `inputs`. With `draw` or `Accept: image/svg+xml`, the response is a
    picture.
    """
    if body.messages is not None:
        call.field_names = {**call.field_names, "inputs": "messages"}
    for name in given_parameters(body.parameters) if body.targets is not None else ():
        if name not in TARGET_PARAMETERS:  # it has no effect
            allowed = ", ".join(f"{{{parameter}}}" for parameter in TARGET_PARAMETERS)
            message = (
                f"{{{name}}} cannot be combined with targets, because nothing is generated; only {allowed} can be."
            )
            raise ApiError("invalid_parameter", message, field=name)
    parameters, languages = None, (body.parameters.source_language, body.parameters.target_language)
    if body.messages is None:
        model = await generating_model(call, body.model, *languages, task="attention")
    else:
        model = await call.model(body.model, "attention", default_for="chat")
    if "parameters" in body.model_fields_set:
        parameters = body.parameters
        if "generate" in model.manifest.tasks:
            parameters = parameters_for(model, given_parameters(parameters))
    inputs = body.inputs if body.messages is None else dialogue_of(model, body.messages)
    assert inputs is not None, "the body has inputs or messages"
    if body.draw is None and not prefers(SVG, headers):
        return await attention(call, model, inputs, body, targets=body.targets, parameters=parameters)
    if isinstance(inputs, Texts) and len(inputs) > 1:
        raise ApiError("invalid_parameter", "A picture shows one input; send one text.", field="inputs")
    view = body.draw or "heatmap"
    selection = selection_to_draw(model.manifest, body, view)
    result = await attention(call, model, inputs, selection, targets=body.targets, parameters=parameters)
    picture = draw(result.model, result.outputs[0], selection, view)
    return Raw(picture.encode(), f"{SVG}; charset=utf-8", 200, {"vary": "Accept"})


ENDPOINTS = (
    Endpoint("POST", "/v1/attention", show_attention, AttentionResult, errors=OUTPUT_ERRORS, media_types=(JSON, SVG)),
)
