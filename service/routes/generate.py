"""POST /v1/generate: text to text, whole or as it comes."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.answers import GenerateAnswer
from service.calls import Call, json_answer, timings_of
from service.engine.request import Generated, GenerateRequest
from service.inputs import decoding_parameters, of_sequence, read_sources
from service.outputs import output_of
from service.routing import add_route
from service.schemas import GenerateBody
from service.serving import ServedModel
from service.streaming import answer_stream
from service.tokenizer import StopStrings


async def generate(body: GenerateBody, call: Call) -> Response:
    """Generate one text from each input.

    With `stream: true` the answer is `text/event-stream`: one event a token, one at each input's end, then `[DONE]`.
    """
    model = call.service.model(body.model, "generate")
    parameters = decoding_parameters(body.parameters, model)
    sources, tokenize_ms = await read_sources(call, model, body.inputs)
    stop = body.parameters.stop
    requests = [
        GenerateRequest(
            request_id=call.record.request_id,
            source_ids=source,
            deadline=call.deadline,
            parameters=of_sequence(parameters, index),
            stop=StopStrings(model.target_tokenizer, stop) if stop else None,
            stream=body.stream,
        )
        for index, source in enumerate(sources)
    ]
    tickets = call.submit(model, requests)
    if body.stream:
        return await answer_stream(call, model, requests, tickets, stop, tokenize_ms)
    results = [result for result in await call.results(tickets) if isinstance(result, Generated)]
    return json_answer(_answer(call, model, requests, results, stop, tokenize_ms))


def _answer(
    call: Call,
    model: ServedModel,
    requests: Sequence[GenerateRequest],
    results: Sequence[Generated],
    stop: Sequence[str],
    tokenize_ms: float,
) -> dict[str, Any]:
    outputs = [
        {"index": index, "rank": 0, **output_of(model, request, result, stop)}
        for index, (request, result) in enumerate(zip(requests, results, strict=True))
    ]
    input_tokens = sum(len(request.source_ids) for request in requests)
    output_tokens = sum(len(result.tokens) for result in results)
    timings_ms = timings_of(call, tokenize_ms, [result.timings for result in results])
    call.tell_result(input_tokens, output_tokens, timings_ms, *(result.finish_reason for result in results))
    call.service.metrics_of(model).call_seconds.observe(timings_ms["total"] / 1000)
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
        errors=(
            *("empty_input", "input_too_long", "unsupported_parameter", "unsupported_task"),
            *("queue_timeout", "loading", "draining", "engine_dead", "deadline_exceeded"),
        ),
        also_answers=["text/event-stream"],
    )
