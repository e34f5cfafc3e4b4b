"""POST /v1/generate: text to text, whole or as it comes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.answers import GenerateAnswer
from service.calls import Call, json_answer, result_of
from service.engine.request import Generated, GenerateRequest, Timings
from service.engine.worker import Ticket
from service.inputs import decoding_parameters, generate_requests, read_prefixes, read_sources
from service.maps import MapWriter, map_writer
from service.outputs import output_of
from service.routing import TASK_ERRORS, add_route
from service.schemas import GenerateBody
from service.serving import ServedModel
from service.streaming import Frames, OwnFrames, answer_stream

# The outputs of one input as they stand in the answer, and where its time went.
Written = tuple[list[dict[str, Any]], Timings]


@dataclass(frozen=True)
class Begun:
    """A generation that the engine has taken."""

    model: ServedModel
    requests: Sequence[GenerateRequest]
    tickets: Sequence[Ticket]
    stop: tuple[str, ...]
    maps: MapWriter | None


async def generate(body: GenerateBody, call: Call) -> Response:
    """Generate one text from each input, or several.

    With `stream: true` the answer is `text/event-stream`: one event a token, one at each input's end, then `[DONE]`.
    """
    if body.stream:
        return await stream_generated(body, call, OwnFrames())
    return json_answer(await generated(body, call))


async def generated(body: GenerateBody, call: Call) -> dict[str, Any]:
    """The whole answer, for any door."""
    begun = await _begin(body, call)
    pairs = zip(begun.requests, begun.tickets, strict=True)
    parts = [_write(begun, index, *pair) for index, pair in enumerate(pairs)]
    return _answer(call, begun, await call.together(parts))


async def stream_generated(body: GenerateBody, call: Call, frames: Frames) -> Response:
    """The answer as it comes, for any door; the body says `stream: true`."""
    begun = await _begin(body, call)
    return await answer_stream(call, begun.model, begun.requests, begun.tickets, begun.stop, begun.maps, frames)


async def _begin(body: GenerateBody, call: Call) -> Begun:
    model = call.service.model(body.model, "generate")
    wanted = body.parameters
    parameters = decoding_parameters(call, model, wanted)
    maps = map_writer(call, model, wanted.return_attention, "parameters.return_attention")
    sources = await read_sources(call, model, body.inputs, parameters=parameters)
    prefixes = await read_prefixes(call, model, wanted.target_prefix, sources)
    requests = generate_requests(
        call, model, parameters, sources, prefixes, stop=wanted.stop, maps=maps, stream=body.stream
    )
    return Begun(model, requests, call.submit(model, requests), wanted.stop, maps)


async def _write(begun: Begun, index: int, request: GenerateRequest, ticket: Ticket) -> Written:
    # As each result comes: its maps are cut to what is wanted while the others still run.
    result = await result_of(ticket, Generated)
    tokenizer, maps = begun.model.target_tokenizer, begun.maps
    outputs = []
    for rank, target in enumerate(result.targets):
        output = {"index": index, "rank": rank, **output_of(tokenizer, request, target, begun.stop)}
        outputs.append(output | {"attention": maps.write(request, target)} if maps else output)
    return outputs, result.timings


def _answer(call: Call, begun: Begun, written: Sequence[Written]) -> dict[str, Any]:
    model = begun.model
    outputs = [output for of_input, _ in written for output in of_input]
    input_tokens = sum(len(request.source_ids) for request in begun.requests)
    output_tokens = sum(len(output["tokens"]) for output in outputs)
    reasons = (output["finish_reason"] for output in outputs)
    timings_ms = call.account(model, [timings for _, timings in written], input_tokens, output_tokens, *reasons)
    return {
        "model": model.name,
        "outputs": outputs,
        "usage": {"input_tokens": input_tokens, "output_tokens": output_tokens},
        "timings_ms": timings_ms,
    }


def add_routes(app: FastAPI) -> None:
    add_route(
        app,
        "POST",
        "/v1/generate",
        generate,
        GenerateAnswer,
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
        also_answers=["text/event-stream"],
    )
