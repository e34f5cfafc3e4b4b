"""What one row of the decoder has written so far."""

from dataclasses import dataclass, field

from service.engine.attention import MapRecorder, RecordedMaps
from service.engine.request import FinishReason, StopCondition, Target, Token

Alternatives = tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Hypothesis:
    """The tokens of a target as far as they are known, those of the prefix first."""

    maps: MapRecorder
    stop: StopCondition | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    rank_score: float = 0.0  # what beams are ranked by: the sum of log-probabilities after the processors

    def append(self, token_id: int, logprob: float, alternatives: Alternatives) -> None:
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.alternatives.append(alternatives)

    def branch(self, rank_score: float) -> "Hypothesis":
        """Another that has written the same and goes its own way."""
        stop = None if self.stop is None else self.stop.copy()
        return Hypothesis(self.maps.branch(), stop, self.ids[:], self.logprobs[:], self.alternatives[:], rank_score)

    def target(self, reason: FinishReason, num_forced: int, length_penalty: float) -> Target:
        """The finished sequence; its score leaves the first `num_forced` tokens out."""
        generated = self.logprobs[num_forced:]
        score = sum(generated) / max(1, len(generated)) ** length_penalty
        tokens = tuple(map(Token, self.ids, self.logprobs, self.alternatives))
        return Target(tokens, reason, score, RecordedMaps(self.maps))
