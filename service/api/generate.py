"""POST /v1/generate."""

from pydantic import ConfigDict

from service.api.endpoint import EVENTS, JSON, TASK_ERRORS, Endpoint, EventStream, event_of
from service.api.types import Inputs, ModelName
from service.fields import RequestBody, case
from service.inference.call import Call
from service.inference.generate import (
    GenerateInput,
    GenerateResult,
    Stream,
    StreamedSequence,
    StreamEnd,
    StreamToken,
    generate,
    stream,
)
from service.parameters import AT_MOST_ONE, PARAMETER_NAMES, GenerateParameters

DONE = b"data: [DONE]\n\n"
FIELD_NAMES = {name: f"parameters.{name}" for name in PARAMETER_NAMES} | {
    name: f"parameters.return_attention.{name}" for name in ("kinds", "layers", "heads")
}


class GenerateBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    parameters: GenerateParameters = GenerateParameters()
    stream: bool = False

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"inputs": "A man is riding a bicycle."},
                {
                    "inputs": ["A dog runs.", "Two children are playing."],
                    "parameters": {"max_new_tokens": 16, "do_sample": True, "top_p": 0.9, "seed": 7, "stop": "."},
                },
                {
                    "inputs": "A dog runs.",
                    "parameters": {
                        "num_beams": 4,
                        "num_return_sequences": 2,
                        "length_penalty": 0.6,
                        "early_stopping": True,
                        "repetition_penalty": 1.1,
                        "no_repeat_ngram_size": 3,
                        "suppress_tokens": [3],
                    },
                },
                {
                    "inputs": "A dog runs.",
                    "parameters": {
                        "target_prefix": "Ein",
                        "top_logprobs": 2,
                        "return_attention": {"kinds": ["cross"], "reduce": "mean"},
                    },
                },
            ],
            "anyOf": [case(stream={"const": False}), case(parameters=case(num_beams=AT_MOST_ONE))],
        }
    )


async def generate_text(call: Call, body: GenerateBody) -> GenerateResult | EventStream:
    """Generate one text or several from each input.

    With `stream: true` the response is `text/event-stream`: one event for each token, one at the end of each sequence,
    then `[DONE]`.
    """
    call.field_names = FIELD_NAMES
    request = GenerateInput(body.model, body.inputs, body.parameters)
    if body.stream:
        return EventStream(await stream(call, request), NativeEventEncoder())
    return await generate(call, request)


class NativeEventEncoder:
    """Writes the events as they are, then `[DONE]`."""

    def token(self, sequence: StreamedSequence, event: StreamToken) -> bytes:
        return event_of(event)

    def end(self, sequence: StreamedSequence, event: StreamEnd) -> bytes:
        return event_of(event)

    def close(self, stream: Stream) -> bytes:
        return DONE

    def error(self, body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/generate",
        generate_text,
        GenerateResult,
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
        media_types=(JSON, EVENTS),
    ),
)
