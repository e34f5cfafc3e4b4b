"""POST /v1/generate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sightline.service.api.endpoint import (
    EVENTS,
    JSON,
    OUTPUT_ERRORS,
    Call,
    Endpoint,
    EventEncoder,
    EventStream,
    event_of,
)
from sightline.service.api.types import INPUTS, ModelName
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import OnEmpty, RequestBody, TextsWithBlanks
from sightline.service.inference.generate import DoubtfulResult, GenerateResult, GenerateWarning, parameters_for
from sightline.service.inference.language_choice import generating_model
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.inference.streaming import Stream, StreamedSequence, StreamEnd, StreamToken, stream
from sightline.service.parameters import NEUTRAL, GenerateParameters, given_parameters

DONE = b"data: [DONE]\n\n"


class GenerateBody(RequestBody):
    model: ModelName = None
    on_empty: OnEmpty = "error"
    inputs: Annotated[TextsWithBlanks, Field(description=INPUTS)]
    parameters: Annotated[GenerateParameters, Field(description="Generation parameters.")] = NEUTRAL
    stream: Annotated[bool, Field(description="Send server-sent events, one for each token.")] = False

    EXAMPLES = (
        {"inputs": "A man is riding a bicycle."},
        {
            "inputs": ["A dog runs.", "Two children are playing."],
            "parameters": {"max_new_tokens": 16, "do_sample": True, "top_p": 0.9, "seed": 7, "stop": "."},
        },
        {"inputs": "A dog runs.", "parameters": {"num_beams": 4, "num_return_sequences": 2, "suppress_tokens": [3]}},
        {
            "inputs": "A dog runs.",
            "parameters": {
                "target_prefix": "Ein",
                "top_logprobs": 2,
                "return_attention": {"kinds": ["cross"], "reduce": "mean"},
            },
        },
        {"inputs": "A dog runs. A man sleeps.\nTwo children are playing.", "parameters": {"split_sentences": True}},
    )


async def generate_text(call: Call, body: GenerateBody) -> GenerateResult | EventStream:
    """Generate one text or several from each input.

    With `stream: true` the response is `text/event-stream`: one event for each token, one at the
    end of each sequence, then `[DONE]`.
    """
    if body.stream and body.on_empty == "pass":
        message = "on_empty: pass cannot be combined with stream: true; leave one of them out."
        raise ApiError("invalid_parameter", message, field="on_empty")
    parameters = body.parameters
    languages = parameters.source_language, parameters.target_language
    if body.model is None and languages != (None, None):
        model = await generating_model(call, None, *languages)
    else:  # the usual call enters one function less
        model = await call.model(body.model, "generate")
    if model.has_generation_defaults:
        parameters = parameters_for(model, given_parameters(parameters), stream=body.stream)
    if body.stream:
        return EventStream(await stream(call, model, body.inputs, parameters), NativeEventEncoder(call.warnings))
    return await generate_texts(call, model, body.inputs, parameters, on_empty=body.on_empty)


@dataclass(frozen=True)
class NativeEventEncoder(EventEncoder):
    """Writes the events, the end of a sequence with the warning about its input, then `[DONE]`."""

    warnings: Mapping[int, GenerateWarning]  # by the index of the input

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        return event_of(event)

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        warning = self.warnings.get(event.index)
        return event_of(event if warning is None else {**vars(event), "warnings": [warning]})

    def close(self, stream: Stream) -> bytes:
        return DONE

    def error(self, body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/generate",
        generate_text,
        GenerateResult | DoubtfulResult,
        errors=OUTPUT_ERRORS,
        media_types=(JSON, EVENTS),
    ),
)
