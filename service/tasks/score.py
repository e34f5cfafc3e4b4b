"""POST /v1/score: log-probabilities of given targets."""

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from sightline.service.api.endpoint import PARAMETER_ERRORS, Call, Endpoint
from sightline.service.api.types import Inputs, ModelName, check_targets
from sightline.service.body_fields import RequestBody, field_error
from sightline.service.engine.request import Generated
from sightline.service.inference.confirmation import confirmed
from sightline.service.inference.coverage import CoverageReader, TextCoverage
from sightline.service.inference.generate import Decoding, output_token, without_forced
from sightline.service.inference.language_choice import choose_languages, generating_model
from sightline.service.inference.results import DecoderOutputs, OutputTokens
from sightline.service.parameters import NEUTRAL, ConfirmOmissions, HiddenSourceTokens, Language, TopLogprobs


class ScoreBody(RequestBody):
    model: ModelName = None
    inputs: Inputs
    targets: Annotated[
        Inputs, Field(description="Text to score for each input: one string, or a list as long as `inputs`.")
    ]
    top_logprobs: TopLogprobs = 0
    source_language: Language | None = None
    target_language: Language | None = None
    hidden_source_tokens: HiddenSourceTokens = ()
    return_coverage: Annotated[
        bool, Field(description="Return which words of each input its target omits, and which of its own are doubtful.")
    ] = False
    confirm_omissions: ConfirmOmissions = False

    EXAMPLES = (
        {"inputs": "A dog runs.", "targets": "Ein Hund rennt."},
        {"inputs": ["A dog.", "A cat."], "targets": ["Ein Hund.", "Ein Hund."], "top_logprobs": 3},
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        check_targets(self.inputs, self.targets)
        if self.confirm_omissions and not self.return_coverage:
            message = "confirm_omissions needs return_coverage; set it to true, or leave out confirm_omissions."
            raise field_error("invalid_parameter", message, "confirm_omissions")
        return self


@dataclass(frozen=True)
class ScoreOutput:
    """The score of one target."""

    index: Annotated[int, Field(description="Index of the input.")]
    score: Annotated[float, Field(description="Sum of the log-probabilities of all tokens, the end token included.")]
    tokens: Annotated[OutputTokens, Field(description="Tokens of the target, the end token last.")]
    coverage: Annotated[TextCoverage | None, Field(description="Only with return_coverage.")]


@dataclass(frozen=True)
class ScoreResult(DecoderOutputs):
    """The scores of a call."""

    outputs: Annotated[list[ScoreOutput], Field(description="One output for each input, in order.")]


async def score_targets(call: Call, body: ScoreBody) -> ScoreResult:
    """Score the target of each input.

    Each target gets its end token; its score is the sum of the log-probabilities of all its tokens.
    """
    model = await generating_model(call, body.model, body.source_language, body.target_language)
    languages = choose_languages(model, body.source_language, body.target_language)
    overrides = {"top_logprobs": body.top_logprobs, "hidden_source_tokens": body.hidden_source_tokens}
    reader = CoverageReader(call, model) if body.return_coverage else None
    decoding = Decoding(call, model, NEUTRAL.model_copy(update=overrides), languages, coverage=reader)
    await decoding.read(body.inputs, body.targets)

    def convert(index: int, result: Generated) -> ScoreOutput:
        request, text = decoding.requests[index], body.targets.texts[index]
        target = without_forced(request, result.targets[0])
        tokens = [output_token(model.target_tokenizer, token) for token in target.tokens]
        coverage = reader.write(index, request, target, text) if reader else None
        return ScoreOutput(index, sum([token.logprob for token in tokens]), tokens, coverage)

    results = await decoding.run(convert)
    if reader and body.confirm_omissions:
        results = await confirmed(decoding, body.targets.texts, *results)
    return ScoreResult(model.name, *results)


ENDPOINTS = (Endpoint("POST", "/v1/score", score_targets, ScoreResult, errors=PARAMETER_ERRORS),)
