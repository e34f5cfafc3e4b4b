"""Slow reference implementations of greedy decoding, beam search and logits processors.

Every faster decoder must give the same results. The searches follow `generate` of Hugging Face
transformers (version 5.23) for encoder-decoder models. The model is a function from prefixes to
logits, so that the same loop runs on PyTorch, on ONNX Runtime or on a table in a test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.recurrent import Memory
from sightline.service.parameters import GenerateParameters

Array = NDArray[np.float32]
EarlyStopping = bool | Literal["never"]

# Maps prefixes to the logits (prefixes, V) of the next token, for one source. Each prefix begins
# with the start token, and all prefixes have the same length.
NextLogits = Callable[[Sequence[Sequence[int]]], Array]

# Returns True if the tokens generated so far (without the prompt) end a hypothesis, as the end
# token does.
Stop = Callable[[Sequence[int]], bool]
EndIds = int | Sequence[int]  # one end token, or several


def as_tuple(end_ids: EndIds) -> tuple[int, ...]:
    return (end_ids,) if isinstance(end_ids, int) else tuple(end_ids)


@dataclass(frozen=True)
class LogitsProcessors:
    """Logits processors of one request, applied in the order of the fields, each off by default.

    They follow Hugging Face transformers: greedy decoding applies them to raw logits, beam search
    to log-probabilities. The biases and the penalties of presence and frequency are those of
    OpenAI's API. One rule is added: if the processors forbid every token, the end token is allowed.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids and what is added to their scores
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    forced_end_at: int | None = None  # number of generated tokens of which the last must be the end token

    def __call__(self, scores: Array, prompt: Sequence[int], generated: Sequence[int], end_ids: EndIds) -> Array:
        """Return processed scores (V,) of the next token; forbidden tokens have -inf.

        Args:
            prompt: the start token and the forced prefix. Repetitions of prompt tokens count too.
            end_ids: the end token or end tokens. Only the first is forced.
        """
        read, changed, ends = [*prompt, *generated], scores.copy(), as_tuple(end_ids)
        for token_id, bias in self.logit_bias:
            changed[token_id] += np.float32(bias)
        seen = list(set(read))
        changed[seen] = penalised(changed[seen], self.repetition_penalty)
        for token_id in set(generated):
            penalty = self.presence_penalty + self.frequency_penalty * list(generated).count(token_id)
            changed[token_id] -= np.float32(penalty)
        changed[repeating_tokens(read, self.no_repeat_ngram_size)] = -np.inf
        if len(generated) < self.min_new_tokens:
            changed[list(ends)] = -np.inf
        changed[list(self.suppress_tokens)] = -np.inf
        if len(generated) + 1 == self.forced_end_at:
            changed[:] = -np.inf
        if changed.max() == -np.inf:
            changed[ends[0]] = 0.0
        return changed


NO_PROCESSORS = LogitsProcessors()


def processors_of(parameters: GenerateParameters) -> LogitsProcessors:
    """Return the logits processors of a request."""
    return LogitsProcessors(
        parameters.logit_bias or (),
        parameters.repetition_penalty,
        parameters.presence_penalty,
        parameters.frequency_penalty,
        parameters.no_repeat_ngram_size,
        parameters.min_new_tokens,
        parameters.suppress_tokens,
    )


def penalised(scores: Array, penalty: float) -> Array:
    """Divide positive scores by the penalty and multiply negative scores by it.

    This is the repetition penalty of Keskar et al. 2019, section 4.1, with the change that Hugging
    Face transformers makes for negative scores.
    """
    return np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))


def repeating_tokens(read: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would complete an n-gram that has occurred before; none for size 0."""
    ngrams = [tuple(read[first : first + size]) for first in range(len(read) - size + 1)] if size else []
    last = tuple(read[len(read) - size + 1 :])  # the n - 1 tokens before the next one
    return [ngram[-1] for ngram in ngrams if ngram[:-1] == last]


@dataclass(frozen=True)
class ReferenceHypothesis:
    """Generated tokens, including the end token if it was generated, but not a forced prefix."""

    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # of the model, before any logits processor
    total: float = 0.0  # score that beam search ranks by: sum of processed log-probabilities

    @property
    def score(self) -> float:
        """Sum of the log-probabilities of the model, before any logits processor."""
        return sum(self.log_probs)

    def penalised_total(self, length_penalty: float, num_forced: int = 0) -> float:
        """Return total / length ** length_penalty; the length includes the end token and
        `num_forced` tokens of the prompt.
        """
        return self.total / math.pow(num_forced + len(self.ids), length_penalty)

    def extended(self, token: int, log_prob: float, processed: float) -> "ReferenceHypothesis":
        return ReferenceHypothesis((*self.ids, token), (*self.log_probs, log_prob), self.total + processed)


def never(generated: Sequence[int]) -> bool:
    """Never stop early; the default `Stop` function."""
    return False


def log_softmax(logits: Array) -> Array:
    """Return natural log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probs: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_probs


def greedy(
    next_logits: NextLogits,
    start_id: int,
    end_ids: EndIds,
    max_new_tokens: int,
    *,
    prefix: Sequence[int] = (),
    processors: LogitsProcessors = NO_PROCESSORS,
    stop: Stop = never,
) -> ReferenceHypothesis:
    """Select the most likely token until the end token, `stop` or `max_new_tokens`.

    Ties go to the lowest token id. The processors are applied to raw logits. `prefix` are forced
    tokens after the start token.
    """
    prompt, hypothesis, ends = [start_id, *prefix], ReferenceHypothesis(), set(as_tuple(end_ids))
    while len(hypothesis.ids) < max_new_tokens and ends.isdisjoint(hypothesis.ids) and not stop(hypothesis.ids):
        (logits,) = next_logits([[*prompt, *hypothesis.ids]])  # (V,)
        token = int(processors(logits, prompt, hypothesis.ids, end_ids).argmax())
        log_prob = float(log_softmax(logits)[token])
        hypothesis = hypothesis.extended(token, log_prob, log_prob)
    return hypothesis


def beam(
    next_logits: NextLogits,
    start_id: int,
    end_ids: EndIds,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return: int = 1,
    *,
    prefix: Sequence[int] = (),
    num_forced: int = 0,
    processors: LogitsProcessors = NO_PROCESSORS,
    stop: Stop = never,
) -> list[ReferenceHypothesis]:
    """Beam search.

    Each step ranks all one-token extensions of the running beams by their sum of processed
    log-probabilities and considers the best 2 * num_beams, or (1 + n) * num_beams with n end tokens
    if that is more. Extensions among the best num_beams that end, with the end token or by `stop`,
    become finished hypotheses; lower-ranked extensions that end are dropped. The best num_beams
    extensions that do not end are the running beams of the next step. The num_beams finished
    hypotheses with the best penalised total (`ReferenceHypothesis.penalised_total`) are kept. At
    `max_new_tokens`, the best num_beams extensions become finished hypotheses even if they have not
    ended.

    The search ends when num_beams hypotheses are finished and either `early_stopping` is True, or
    the best running beam cannot score higher than the worst finished one. The bound on a running
    beam is its total, penalised at its most favourable length. With "never", this length is
    max_new_tokens if length_penalty > 0 and the current length otherwise. With False, it is always
    the current length. This is a heuristic, as in Hugging Face transformers: a longer continuation
    can exceed the bound.

    Ties are ranked by the order of their beams, then by token id.

    Args:
        num_return: number of hypotheses to return, from 1 to num_beams.
        prefix: forced tokens after the start token.
        num_forced: number of prefix tokens that count in the length, as Transformers counts tokens
            that the model is forced to generate.
        processors: applied to log-probabilities.

    Returns:
        The best hypotheses, best first; fewer if the vocabulary and the length allow no more.
    """
    prompt, beams, finished, ends = (
        [start_id, *prefix],
        [ReferenceHypothesis()],
        list[ReferenceHypothesis](),
        as_tuple(end_ids),
    )
    count = max(2, 1 + len(ends)) * num_beams
    for length in range(1, max_new_tokens + 1):
        candidates = _extensions(next_logits, prompt, ends, processors, beams, count)
        done = [
            length == max_new_tokens or candidate.ids[-1] in ends or stop(candidate.ids) for candidate in candidates
        ]
        finished += [candidate for candidate, ended in zip(candidates[:num_beams], done, strict=False) if ended]
        finished = sorted(finished, key=lambda h: -h.penalised_total(length_penalty, num_forced))[:num_beams]
        beams = [candidate for candidate, ended in zip(candidates, done, strict=True) if not ended][:num_beams]
        if not beams:
            break
        if len(finished) == num_beams:
            best_length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
            bound = beams[0].total / math.pow(num_forced + best_length, length_penalty)
            if early_stopping is True or bound <= finished[-1].penalised_total(length_penalty, num_forced):
                break
    return finished[:num_return]


def _extensions(
    next_logits: NextLogits,
    prompt: Sequence[int],
    end_ids: EndIds,
    processors: LogitsProcessors,
    beams: Sequence[ReferenceHypothesis],
    count: int,
) -> list[ReferenceHypothesis]:
    """Return the `count` best allowed one-token extensions of the beams, best first."""
    log_probs = log_softmax(next_logits([[*prompt, *hypothesis.ids] for hypothesis in beams]))  # (beams, V)
    processed = np.stack([processors(row, prompt, h.ids, end_ids) for row, h in zip(log_probs, beams, strict=True)])
    totals = processed + np.array([[hypothesis.total] for hypothesis in beams])  # (beams, V)
    best = np.argsort(-totals, axis=None, kind="stable")[:count]
    rows, tokens = np.unravel_index(best, totals.shape)
    return [
        beams[row].extended(int(token), float(log_probs[row, token]), float(processed[row, token]))
        for row, token in zip(rows, tokens, strict=True)
        if totals[row, token] > -np.inf
    ]


def pytorch_steps(model: TranslationModel | CausalModel, source_ids: Sequence[int]) -> NextLogits:
    """Return the `NextLogits` function of a PyTorch model in evaluation mode. The encoder runs
    once; the decoder reads the whole prefix at each call.

    For a causal model, the source is the prompt; its last token is the start token of the prefixes.
    """
    assert not model.training
    if isinstance(model, CausalModel):
        return _causal_steps(model, source_ids[:-1])
    device = model.embedding.weight.device
    with torch.inference_mode():
        lengths = torch.tensor([len(source_ids)], device=device)
        memory, _ = model.encode(torch.tensor([list(source_ids)], device=device), lengths)  # (1, S, M)

    @torch.inference_mode()
    def next_logits(prefixes: Sequence[Sequence[int]]) -> Array:
        target = torch.tensor([list(prefix) for prefix in prefixes], device=device)  # (B, T)
        batch_size = len(prefixes)
        decoded, _, _ = model.decode(target, _repeated(memory, batch_size), lengths.expand(batch_size))
        logits: Array = model.logits(decoded[:, -1]).cpu().numpy()  # (B, V)
        return logits

    return next_logits


def _causal_steps(model: CausalModel, prompt: Sequence[int]) -> NextLogits:
    """Return the `NextLogits` function of a causal model after the given prompt tokens."""

    @torch.inference_mode()
    def next_logits(prefixes: Sequence[Sequence[int]]) -> Array:
        ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes], device=model.embedding.weight.device)
        features, _ = model.hidden_states(ids)
        logits: Array = model.logits(features[:, -1]).cpu().numpy()  # (B, V)
        return logits

    return next_logits


def _repeated(memory: Tensor | Memory, batch_size: int) -> Any:
    """Expand the encoder's output of one source to a batch."""
    if isinstance(memory, Tensor):
        return memory.expand(batch_size, -1, -1)
    return Memory(*(part.expand(batch_size, *part.shape[1:]) for part in memory))
