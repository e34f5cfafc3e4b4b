"""POST /v1/attention: what the model looks at, for what it generates or for a target that is given."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.answers import AttentionAnswer
from service.calls import Call, json_answer
from service.engine.request import DecodingParameters, Encoded, EncodeRequest, Generated, GenerateRequest
from service.errors import ApiError
from service.fields import Texts
from service.inputs import decoding_parameters, generate_requests, read_prefixes, read_sources, read_targets
from service.maps import MapWriter
from service.outputs import generated_tokens, seed_of, text_of_target
from service.routing import TASK_ERRORS, add_route
from service.schemas import AttentionBody
from service.serving import ServedModel


async def attention(body: AttentionBody, call: Call) -> Response:
    """Show the attention of one input's generation, or of a given target.

    Without `target` the maps are those of the pass that generates; with it, the target is forced. A model that
    generates nothing answers with its encoder's maps alone.
    """
    model = call.service.model(body.model, "attention")
    maps = MapWriter(model, body, call.response_memory)
    if "generate" not in model.manifest.tasks:
        return await _of_encoder(body, call, model, maps)
    parameters = decoding_parameters(call, model, body.parameters)
    sources = await read_sources(call, model, Texts((body.input,), "input", is_list=False), parameters=parameters)
    if body.target is None:
        prefixes = await read_prefixes(call, model, body.parameters.target_prefix, sources)
    else:
        parameters = DecodingParameters(max_new_tokens=0)
        prefixes = await read_targets(call, model, Texts((body.target,), "target", is_list=False), sources)
    stop = body.parameters.stop
    requests = generate_requests(call, model, parameters, sources, prefixes, stop=stop, maps=maps)
    (result,) = await call.results(call.submit(model, requests), Generated)
    return json_answer(_answer(call, model, requests[0], result, stop, maps))


async def _of_encoder(body: AttentionBody, call: Call, model: ServedModel, maps: MapWriter) -> Response:
    for name in ("target", "parameters"):
        if name in body.model_fields_set:
            raise ApiError("unsupported_parameter", f"{model.name} generates nothing.", param=name)
    (source,) = await read_sources(call, model, Texts((body.input,), "input", is_list=False))
    request = EncodeRequest(call.record.request_id, source, call.deadline, attention=maps.kinds)
    maps.check([request])
    (result,) = await call.results(call.submit(model, [request]), Encoded)
    of_target: dict[str, Any] = {"text": "", "finish_reason": None, "target_tokens": [], "decoder_input_tokens": []}
    answer = {"model": model.name, **of_target, **maps.write_encoded(request, result)}
    timings_ms = call.account(model, [result.timings], len(source), 0)
    return json_answer(answer | {"usage": _usage(len(source), 0), "timings_ms": timings_ms})


def _answer(
    call: Call, model: ServedModel, request: GenerateRequest, result: Generated, stop: tuple[str, ...], maps: MapWriter
) -> dict[str, Any]:
    target = result.targets[0]
    of_target = target.tokens if target.finish_reason == "forced" else generated_tokens(request, target)
    answer = {
        "model": model.name,
        "text": text_of_target(model.target_tokenizer, request, target, stop),
        "finish_reason": target.finish_reason,
        **seed_of(request),
        **maps.write(request, target),
    }
    counts = len(request.source_ids), len(of_target)
    timings_ms = call.account(model, [result.timings], *counts, target.finish_reason)
    return answer | {"usage": _usage(*counts), "timings_ms": timings_ms}


def _usage(input_tokens: int, output_tokens: int) -> dict[str, int]:
    return {"input_tokens": input_tokens, "output_tokens": output_tokens}


def add_routes(app: FastAPI) -> None:
    add_route(
        app,
        "POST",
        "/v1/attention",
        attention,
        AttentionAnswer,
        errors=(*TASK_ERRORS, "unsupported_parameter", "response_too_large"),
    )
