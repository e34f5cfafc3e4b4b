"""The tokens of one row so far."""

from dataclasses import dataclass, field

from sightline.service.engine.recorded_maps import MapRecorder
from sightline.service.engine.request import FinishReason, Matcher, StopCondition, Target, Token

Alternatives = tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Hypothesis:
    """A target so far: the tokens of the prefix, then the generated tokens."""

    maps: MapRecorder
    stop: StopCondition | None
    matcher: Matcher | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    rank_score: float = 0.0  # beam score: the sum of log-probabilities after the logits processors

    def append(self, token_id: int, logprob: float, alternatives: Alternatives) -> None:
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.alternatives.append(alternatives)

    def fork(self) -> "Hypothesis":
        """Return a copy that continues independently, apart from its stop condition."""
        matcher = self.matcher and self.matcher.copy()
        ids, logprobs, alternatives = self.ids[:], self.logprobs[:], self.alternatives[:]
        return Hypothesis(self.maps.fork(), self.stop, matcher, ids, logprobs, alternatives, self.rank_score)

    def target(
        self, reason: FinishReason, num_prefix: int, length_penalty: float, num_forced: int, *, has_forced_end: bool
    ) -> Target:
        """Return the finished target; its score is divided by its length ** `length_penalty`.

        The length includes `num_forced` tokens before the generated ones. The log-probabilities of
        `num_prefix` prefix tokens do not count in the score, nor, with `has_forced_end`, does that
        of a last token that was forced, as in Transformers.
        """
        generated = self.logprobs[num_prefix:]
        counted = generated[:-1] if has_forced_end else generated
        score = sum(counted) / max(1, num_forced + len(generated)) ** length_penalty
        tokens = tuple(map(Token, self.ids, self.logprobs, self.alternatives))
        return Target(tokens, reason, score, self.maps)
