"""Scoring: the log-probabilities of given targets."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from service.engine.request import Generated
from service.fields import Texts
from service.inference.call import Call
from service.inference.generate import expected_work, generate_requests, output_token, read_targets
from service.inference.results import OutputTokens, TimingsMs, Usage
from service.parameters import GenerateParameters


@dataclass(frozen=True)
class ScoreInput:
    """A request for the scores of targets, one for each input."""

    model: str | None
    inputs: Texts
    targets: Texts
    top_logprobs: int = 0


@dataclass(frozen=True)
class ScoreOutput:
    """The score of one target."""

    index: int
    score: Annotated[float, Field(description="Sum of the log-probabilities of all tokens, the end token included.")]
    tokens: OutputTokens


@dataclass(frozen=True)
class ScoreResult:
    """The scores of a call."""

    model: str
    outputs: list[ScoreOutput]
    usage: Usage
    timings_ms: TimingsMs


async def score(call: Call, request: ScoreInput) -> ScoreResult:
    """Score the target of each input.

    Raises:
        ApiError: the request is not allowed, does not fit, or fails.
        ClientGoneError: the client has left.
    """
    model = call.model(request.model, "generate")
    _, units = expected_work(call.service.admissions[model.name].throughput, GenerateParameters())
    sources = await call.read_sources(model, request.inputs, units=units)
    targets = await read_targets(call, model, request.targets, "targets", sources)
    parameters = GenerateParameters(max_new_tokens=0, top_logprobs=request.top_logprobs)
    requests = generate_requests(call, model, parameters, sources, targets)
    results: list[Generated] = []

    def convert(index: int, result: Generated) -> ScoreOutput:
        results.append(result)
        tokens = [output_token(model.target_tokenizer, token) for token in result.targets[0].tokens]
        return ScoreOutput(index, sum([token.logprob for token in tokens]), tokens)

    outputs = await call.gather(model, requests, Generated, convert)
    usage = Usage(sum(map(len, sources)), sum(map(len, targets)))
    timings = call.timings(results)
    call.record_usage(model, timings, usage.input_tokens, usage.output_tokens, ["forced"] * len(outputs))
    return ScoreResult(model.name, outputs, usage, timings)
