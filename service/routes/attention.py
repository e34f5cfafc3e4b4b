"""POST /v1/attention: what the model looks at, for what it generates or for a target that is given."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.answers import AttentionAnswer
from service.calls import Call, json_answer, timings_of
from service.engine.request import DecodingParameters, Generated, GenerateRequest
from service.fields import Texts
from service.inputs import decoding_parameters, generate_requests, read_prefixes, read_sources, read_targets
from service.maps import MapWriter
from service.outputs import generated_tokens, seed_of, text_of_target
from service.routing import add_route
from service.schemas import AttentionBody
from service.serving import ServedModel


async def attention(body: AttentionBody, call: Call) -> Response:
    """Show the attention of one input's generation, or of a given target.

    Without `target` the maps are those of the pass that generates; with it, the target is forced.
    """
    model = call.service.model(body.model, "attention")
    maps = MapWriter(model, body)
    parameters = decoding_parameters(call, model, body.parameters)
    sources = await read_sources(call, model, Texts((body.input,), "input", is_list=False))
    if body.target is None:
        prefixes = await read_prefixes(call, model, body.parameters.target_prefix, 1)
    else:
        parameters = DecodingParameters(max_new_tokens=0)
        prefixes = await read_targets(call, model, Texts((body.target,), "target", is_list=False))
    stop = body.parameters.stop
    requests = generate_requests(call, model, parameters, sources, prefixes, stop=stop, attention=maps.kinds)
    maps.check(requests)
    (result,) = await call.results(call.submit(model, requests), Generated)
    return json_answer(_answer(call, model, requests[0], result, stop, maps))


def _answer(
    call: Call, model: ServedModel, request: GenerateRequest, result: Generated, stop: tuple[str, ...], maps: MapWriter
) -> dict[str, Any]:
    target = result.targets[0]
    of_target = target.tokens if target.finish_reason == "forced" else generated_tokens(request, target)
    usage = {"input_tokens": len(request.source_ids), "output_tokens": len(of_target)}
    answer = {
        "model": model.name,
        "text": text_of_target(model.target_tokenizer, request, target, stop),
        "finish_reason": target.finish_reason,
        **seed_of(request),
        **maps.write(request, target),
    }
    timings_ms = timings_of(call, [result.timings])
    call.tell_result(usage["input_tokens"], usage["output_tokens"], timings_ms, target.finish_reason)
    call.service.metrics_of(model).call_seconds.observe(timings_ms["total"] / 1000)
    return answer | {"usage": usage, "timings_ms": timings_ms}


def add_routes(app: FastAPI) -> None:
    add_route(
        app,
        "POST",
        "/v1/attention",
        attention,
        AttentionAnswer,
        errors=(
            *("empty_input", "input_too_long", "unsupported_parameter", "unsupported_task", "response_too_large"),
            *("queue_timeout", "loading", "draining", "engine_dead", "deadline_exceeded"),
        ),
    )
