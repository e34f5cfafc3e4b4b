"""Attention maps of inputs or of a dialogue: of a generation, of a forced target, or of an
encoder-only model.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.engine.request import Encoded, Generated
from service.errors import ApiError
from service.fields import Texts
from service.inference.call import Call
from service.inference.encoder import run_encoder
from service.inference.generate import (
    check_parameters,
    expected_work,
    generate_requests,
    parameters_for,
    read_prefixes,
    read_targets,
    text_of,
)
from service.inference.languages import choose_languages
from service.inference.maps import MapWriter, TargetAttention
from service.inference.results import TimingsMs, Usage
from service.inference.service import ServedModel
from service.parameters import FORCED, AttentionSelection, GenerateParameters
from service.text.chat import Prompt

# Generation parameters that can be combined with targets.
TARGET_PARAMETERS = ("source_language", "target_language", "hidden_source_tokens")


@dataclass(frozen=True)
class AttentionInput:
    """A request for attention maps."""

    model: str | None
    inputs: Texts | Prompt
    selection: AttentionSelection
    targets: Texts | None = None  # forced target of each input; generated if None
    # For the generation of the targets. With targets, only `TARGET_PARAMETERS` have an effect.
    parameters: GenerateParameters | None = None


@dataclass(frozen=True)
class AttentionOutput(TargetAttention):
    """Attention maps of one input and the text that they belong to."""

    index: Annotated[int, Field(description="Index of the input.")]
    text: Annotated[str, Field(description="Text that the maps belong to.")]
    finish_reason: Annotated[
        Literal["eos", "length", "stop", "forced"] | None, Field(description="Null if the model generates no text.")
    ]
    seed: Annotated[int | None, Field(description="Only with do_sample.")]


@dataclass(frozen=True)
class AttentionResult:
    """The attention maps of a call."""

    model: Annotated[str, Field(description="Name of the model.")]
    outputs: Annotated[list[AttentionOutput], Field(description="One output for each input, in order.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


async def attention(call: Call, request: AttentionInput) -> AttentionResult:
    """Return the attention maps of each input.

    Without targets, the model generates a text for each input and the maps belong to it. With
    targets, the decoder is forced to produce them. A model without a decoder has only encoder maps.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    model = await call.model(request.model, "attention")
    if "generate" not in model.manifest.tasks:
        return await _encoder_attention(call, model, request)
    if isinstance(request.inputs, Texts) and request.inputs.second_texts is not None:
        message = f"It must have no pairs of texts, because {model.name} generates text from a single text."
        raise ApiError("unsupported_parameter", message, field="inputs")
    parameters = request.parameters or parameters_for(model, {})
    languages = choose_languages(model, parameters.source_language, parameters.target_language)
    maps = MapWriter(call, model, request.selection, languages)
    check_one_sequence(parameters)
    check_parameters(model, parameters, len(request.inputs))
    _, units = expected_work(call.service.admissions[model.name].throughput, parameters)
    if isinstance(request.inputs, Prompt):
        sources = await call.read_prompt(model, request.inputs, units=units)
    else:
        sources = await call.read_sources(
            model, request.inputs, units=units, prefix=languages.source_prefix, suffix=languages.source_suffix
        )
    await maps.read_offsets(call, request.inputs, sources)
    prefixes = None
    if request.targets is None and parameters.target_prefix is not None:
        prefixes = await read_prefixes(call, model, parameters.target_prefix, sources, languages)
    elif request.targets is not None:
        parameters = FORCED.model_copy(update={"hidden_source_tokens": parameters.hidden_source_tokens})
        prefixes = await read_targets(call, model, request.targets, sources, languages)
    requests = generate_requests(call, model, parameters, sources, prefixes, maps=maps, languages=languages)
    results: list[Generated] = []
    num_output_tokens: list[int] = []

    def convert(index: int, result: Generated) -> AttentionOutput:
        results.append(result)
        engine_request, target = requests[index], result.targets[0]
        generated = target.tokens[len(engine_request.target_prefix) :]
        ids = [token.id for token in generated]
        num_language_tokens = len(languages.target_prefix)
        is_forced = target.finish_reason == "forced"
        num_output_tokens.append(len(target.tokens) - num_language_tokens if is_forced else len(generated))
        prefix = engine_request.target_prefix[num_language_tokens:]
        text = text_of(model.target_tokenizer, ids, parameters.stop, prefix)
        found = maps.write(index, engine_request, target, text)
        return AttentionOutput(
            **vars(found),
            index=index,
            text=text,
            finish_reason=target.finish_reason,
            seed=engine_request.seed if parameters.do_sample else None,
        )

    outputs = await call.gather(model, requests, Generated, convert)
    usage = Usage(sum(map(len, sources)), sum(num_output_tokens))
    return _result(call, model, outputs, usage, call.timings(results))


async def _encoder_attention(call: Call, model: ServedModel, request: AttentionInput) -> AttentionResult:
    maps = MapWriter(call, model, request.selection)
    for field, value in (("targets", request.targets), ("parameters", request.parameters)):
        if value is not None:
            message = f"{model.name} does not generate text: leave out {{{field}}}."
            raise ApiError("unsupported_parameter", message, field=field)
    assert isinstance(request.inputs, Texts), "a model with a chat template generates text"
    sources = await call.read_sources(model, request.inputs)
    await maps.read_offsets(call, request.inputs, sources)

    def convert(index: int, result: Encoded) -> AttentionOutput:
        found = maps.write_encoded(index, result)
        return AttentionOutput(
            **vars(found),
            target_tokens=[],
            target_offsets=[],
            decoder_input_tokens=[],
            index=index,
            text="",
            finish_reason=None,
            seed=None,
        )

    outputs, usage, timings = await run_encoder(call, model, sources, convert, maps=maps)
    return AttentionResult(model.name, outputs, usage, timings)


def _result(
    call: Call, model: ServedModel, outputs: list[AttentionOutput], usage: Usage, timings: TimingsMs
) -> AttentionResult:
    reasons = [output.finish_reason for output in outputs if output.finish_reason is not None]
    call.record_usage(model, timings, usage.input_tokens, usage.output_tokens, reasons)
    return AttentionResult(model.name, outputs, usage, timings)


def check_one_sequence(parameters: GenerateParameters, subject: str = "maps") -> None:
    """Check that parameters ask for one target of each input; `subject` is the response's content.

    Raises:
        ApiError: `unsupported_parameter`.
    """
    for field, is_requested in (
        ("num_return_sequences", parameters.num_return_sequences > 1),
        ("top_logprobs", parameters.top_logprobs > 0),
        ("return_attention", parameters.return_attention is not None),
        ("split_sentences", parameters.split_sentences),
    ):
        if is_requested:
            message = (
                f"This endpoint returns the {subject} of one target for each input; "
                f"use POST /v1/generate for {{{field}}}."
            )
            raise ApiError("unsupported_parameter", message, field=field)
