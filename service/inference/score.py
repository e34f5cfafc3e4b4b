"""Scoring: log-probabilities of given targets."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sightline.service.body_fields import Texts
from sightline.service.engine.request import Generated
from sightline.service.inference.call import Call
from sightline.service.inference.generate import Decoding, output_token, without_forced
from sightline.service.inference.language_choice import choose_languages
from sightline.service.inference.results import DecoderOutputs, OutputTokens
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import NEUTRAL


@dataclass(frozen=True)
class ScoreOutput:
    """The score of one target."""

    index: Annotated[int, Field(description="Index of the input.")]
    score: Annotated[float, Field(description="Sum of the log-probabilities of all tokens, the end token included.")]
    tokens: Annotated[OutputTokens, Field(description="Tokens of the target, the end token last.")]


@dataclass(frozen=True)
class ScoreResult(DecoderOutputs):
    """The scores of a call."""

    outputs: Annotated[list[ScoreOutput], Field(description="One output for each input, in order.")]


async def score(
    call: Call,
    model: ServedModel,
    inputs: Texts,
    targets: Texts,
    *,
    top_logprobs: int = 0,
    source_language: str | None = None,
    target_language: str | None = None,
    hidden_source_tokens: tuple[int, ...] = (),
) -> ScoreResult:
    """Return the score of the target of each input."""
    languages = choose_languages(model, source_language, target_language)
    overrides = {"top_logprobs": top_logprobs, "hidden_source_tokens": hidden_source_tokens}
    parameters = NEUTRAL.model_copy(update=overrides)
    decoding = Decoding(call, model, parameters, languages)
    await decoding.read(inputs, targets)

    def convert(index: int, result: Generated) -> ScoreOutput:
        target = without_forced(decoding.requests[index], result.targets[0])
        tokens = [output_token(model.target_tokenizer, token) for token in target.tokens]
        return ScoreOutput(index, sum([token.logprob for token in tokens]), tokens)

    return ScoreResult(model.name, *await decoding.run(convert))
