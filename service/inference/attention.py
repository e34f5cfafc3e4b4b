"""Attention of one input: of its generation, of a given target, or of an encoder alone."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.engine.request import Encoded, EncodeRequest, Generated
from service.errors import ApiError
from service.fields import Texts
from service.inference.call import Call
from service.inference.generate import (
    check_parameters,
    expected_work,
    generate_requests,
    read_prefixes,
    read_targets,
    text_of,
)
from service.inference.maps import MapWriter, TargetAttention
from service.inference.results import FLOAT_BYTES, TimingsMs, Usage
from service.inference.service import ServedModel
from service.parameters import AttentionSelection, GenerateParameters


@dataclass(frozen=True)
class AttentionInput:
    """A request for attention maps."""

    model: str | None
    input: str
    selection: AttentionSelection
    target: str | None = None  # a forced target instead of a generated one
    parameters: GenerateParameters | None = None  # of the generation


@dataclass(frozen=True)
class AttentionResult(TargetAttention):
    """The maps of one pass, and the text that they belong to."""

    model: str
    text: str
    finish_reason: Annotated[
        Literal["eos", "length", "stop", "forced"] | None, Field(description="Null if the model generates no text.")
    ]
    seed: Annotated[int | None, Field(description="Only with do_sample.")]
    usage: Usage
    timings_ms: TimingsMs


async def attention(call: Call, request: AttentionInput) -> AttentionResult:
    """Return the attention maps of one input.

    Without a target the maps are those of the pass that generates the text; with it, the target is forced. A model that
    generates no text has only its encoder's maps.

    Raises:
        ApiError: the request is not allowed, does not fit, or fails.
        ClientGoneError: the client has left.
    """
    model = call.model(request.model, "attention")
    maps = MapWriter(call, model, request.selection)
    if "generate" not in model.manifest.tasks:
        return await _encoder_attention(call, model, request, maps)
    parameters = request.parameters or GenerateParameters()
    _check_one_sequence(parameters)
    check_parameters(model, parameters, 1)
    _, units = expected_work(call.service.admissions[model.name].throughput, parameters)
    sources = await call.read_sources(model, Texts.one(request.input), "input", units=units)
    prefixes = None
    if request.target is None and parameters.target_prefix is not None:
        prefixes = await read_prefixes(call, model, parameters.target_prefix, sources)
    elif request.target is not None:
        parameters = GenerateParameters(max_new_tokens=0)
        prefixes = await read_targets(call, model, Texts.one(request.target), "target", sources)
    requests = generate_requests(call, model, parameters, sources, prefixes, maps=maps)

    def convert(index: int, result: Generated) -> AttentionResult:
        engine_request, target = requests[index], result.targets[0]
        generated = target.tokens[len(engine_request.target_prefix) :]
        ids = [token.id for token in generated]
        num_output = len(target.tokens) if target.finish_reason == "forced" else len(generated)
        found = maps.write(engine_request, target)
        return AttentionResult(
            found.source_tokens,
            found.maps,
            found.target_tokens,
            found.decoder_input_tokens,
            model.name,
            text_of(model.target_tokenizer, ids, parameters.stop, engine_request.target_prefix),
            target.finish_reason,
            engine_request.seed if parameters.do_sample else None,
            Usage(len(engine_request.source_ids), num_output),
            call.timings([result]),
        )

    (found,) = await call.gather(model, requests, Generated, convert)
    assert found.finish_reason is not None
    _record(call, model, found, [found.finish_reason])
    return found


async def _encoder_attention(
    call: Call, model: ServedModel, request: AttentionInput, maps: MapWriter
) -> AttentionResult:
    for field, value in (("target", request.target), ("parameters", request.parameters)):
        if value is not None:
            raise ApiError("unsupported_parameter", f"{model.name} generates no text.", field=field)
    (source,) = await call.read_sources(model, Texts.one(request.input), "input")
    engine_request = EncodeRequest(call.request_id, source, call.deadline, attention=maps.kinds)
    maps.check([engine_request])
    call.response_memory.reserve(FLOAT_BYTES * model.hidden_size * len(source))

    def convert(index: int, result: Encoded) -> AttentionResult:
        found = maps.write_encoded(engine_request, result)
        usage = Usage(len(source), 0)
        timings = call.timings([result])
        return AttentionResult(found.source_tokens, found.maps, [], [], model.name, "", None, None, usage, timings)

    (found,) = await call.gather(model, [engine_request], Encoded, convert)
    _record(call, model, found, [])
    return found


def _check_one_sequence(parameters: GenerateParameters) -> None:
    for field, is_wanted in (
        ("num_return_sequences", parameters.num_return_sequences > 1),
        ("top_logprobs", parameters.top_logprobs > 0),
        ("return_attention", parameters.return_attention is not None),
    ):
        if is_wanted:
            message = "This endpoint returns only the maps of one target; POST /v1/generate has {" + field + "}."
            raise ApiError("unsupported_parameter", message, field=field)


def _record(call: Call, model: ServedModel, found: AttentionResult, reasons: list[str]) -> None:
    call.record_usage(model, found.timings_ms, found.usage.input_tokens, found.usage.output_tokens, reasons)
