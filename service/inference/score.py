"""Scoring: log-probabilities of given targets."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from service.engine.request import Generated
from service.fields import Texts
from service.inference.call import Call
from service.inference.generate import expected_work, generate_requests, output_token, read_targets
from service.inference.languages import choose_languages, generating_model
from service.inference.results import OutputTokens, TimingsMs, Usage
from service.parameters import FORCED, NEUTRAL


@dataclass(frozen=True)
class ScoreInput:
    """A request for the scores of targets, one for each input."""

    model: str | None
    inputs: Texts
    targets: Texts
    top_logprobs: int = 0
    source_language: str | None = None
    target_language: str | None = None
    hidden_source_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScoreOutput:
    """The score of one target."""

    index: Annotated[int, Field(description="Index of the input.")]
    score: Annotated[float, Field(description="Sum of the log-probabilities of all tokens, the end token included.")]
    tokens: Annotated[OutputTokens, Field(description="Tokens of the target, the end token last.")]


@dataclass(frozen=True)
class ScoreResult:
    """The scores of a call."""

    model: Annotated[str, Field(description="Name of the model.")]
    outputs: Annotated[list[ScoreOutput], Field(description="One output for each input, in order.")]
    usage: Annotated[Usage, Field(description="Token counts.")]
    timings_ms: Annotated[TimingsMs, Field(description="Time spent in each stage.")]


async def score(call: Call, request: ScoreInput) -> ScoreResult:
    """Return the score of the target of each input.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    model = await generating_model(call, request.model, request.source_language, request.target_language)
    _, units = expected_work(call.service.admissions[model.name].throughput, NEUTRAL)
    languages = choose_languages(model, request.source_language, request.target_language)
    sources = await call.read_sources(
        model, request.inputs, units=units, prefix=languages.source_prefix, suffix=languages.source_suffix
    )
    targets = await read_targets(call, model, request.targets, sources, languages)
    parameters = FORCED.model_copy(
        update={"top_logprobs": request.top_logprobs, "hidden_source_tokens": request.hidden_source_tokens}
    )
    requests = generate_requests(call, model, parameters, sources, targets, languages=languages)
    results: list[Generated] = []

    def convert(index: int, result: Generated) -> ScoreOutput:
        results.append(result)
        scored = result.targets[0].tokens[len(languages.target_prefix) :]
        tokens = [output_token(model.target_tokenizer, token) for token in scored]
        return ScoreOutput(index, sum([token.logprob for token in tokens]), tokens)

    outputs = await call.gather(model, requests, Generated, convert)
    usage = Usage(sum(map(len, sources)), sum(map(len, targets)))
    timings = call.timings(results)
    call.record_usage(model, timings, usage.input_tokens, usage.output_tokens, ["forced"] * len(outputs))
    return ScoreResult(model.name, outputs, usage, timings)
