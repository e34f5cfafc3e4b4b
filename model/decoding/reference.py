"""Greedy and beam decoding, slow and obvious: what every faster decoder must agree with.

Both do what `generate` of Hugging Face transformers (version 5.23) does for encoder-decoder models. They take the step
as a function, so the same loop runs over PyTorch, over ONNX Runtime or over a table in a test.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.architectures.causal import CausalModel
from model.architectures.factory import TranslationModel
from model.architectures.recurrent import Memory
from model.decoding.processors import UNPROCESSED, Processors

Array = NDArray[np.float32]
EarlyStopping = bool | Literal["never"]

# What the decoder has read, each beginning with the start token and all of one length, to the logits (rows, V) of the
# token that follows each of them, for one source.
NextLogits = Callable[[Sequence[Sequence[int]]], Array]

# Whether the tokens generated so far (prompt excluded) end a hypothesis as the end token would.
Stop = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class Hypothesis:
    """Generated tokens, the end token included where there is one; a forced prefix is no part of it."""

    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # the model's own, before any processor
    total: float = 0.0  # what beam search ranks by: the log-probabilities that the processors left, summed

    @property
    def score(self) -> float:
        """Sum of the model's own log-probabilities."""
        return sum(self.log_probs)

    def penalised_total(self, length_penalty: float) -> float:
        """The total divided by length ** length_penalty; the end token counts, the prompt does not."""
        return self.total / math.pow(len(self.ids), length_penalty)

    def extended(self, token: int, log_prob: float, processed: float) -> "Hypothesis":
        return Hypothesis((*self.ids, token), (*self.log_probs, log_prob), self.total + processed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Steps of a few rows gain nothing from more threads, and lose hundredfold where another process has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def never(generated: Sequence[int]) -> bool:
    """The stop of a search that only the end token and the length end."""
    return False


def log_softmax(logits: Array) -> Array:
    """Natural log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probs: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_probs


def greedy(
    next_logits: NextLogits,
    start_id: int,
    end_id: int,
    max_new_tokens: int,
    *,
    prefix: Sequence[int] = (),
    processors: Processors = UNPROCESSED,
    stop: Stop = never,
) -> Hypothesis:
    """Take the likeliest token (the lowest id among equals) until the end token, `stop` or `max_new_tokens`.

    The processors see raw logits.
    """
    prompt, hypothesis = [start_id, *prefix], Hypothesis()
    while len(hypothesis.ids) < max_new_tokens and end_id not in hypothesis.ids and not stop(hypothesis.ids):
        (logits,) = next_logits([[*prompt, *hypothesis.ids]])  # (V,)
        token = int(processors(logits, prompt, hypothesis.ids, end_id).argmax())
        log_prob = float(log_softmax(logits)[token])
        hypothesis = hypothesis.extended(token, log_prob, log_prob)
    return hypothesis


def beam(
    next_logits: NextLogits,
    start_id: int,
    end_id: int,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return: int = 1,
    *,
    prefix: Sequence[int] = (),
    processors: Processors = UNPROCESSED,
    stop: Stop = never,
) -> list[Hypothesis]:
    """Beam search.

    Each step ranks every one-token extension of the open beams by its sum of log-probabilities, as the processors left
    them, and looks at the first 2 * num_beams. Those among the first num_beams that end, with the end token or by
    `stop`, are finished; one that ranks lower and ends is dropped. The first num_beams that do not end are the open
    beams of the next step. Of the finished, the num_beams with the best penalised total (`Hypothesis.penalised_total`)
    are kept. At `max_new_tokens` the first num_beams extensions are finished, ended or not.

    The search ends when num_beams are finished and either `early_stopping` is True or the best open beam's total is no
    better than the worst of them even when penalised at the most favourable length: with "never" that is
    max_new_tokens where length_penalty > 0, else its present length. With False it is always its present length: a
    longer continuation could still come to beat that bound, so this is a heuristic, as it is there.

    Equals rank by the order of their beams, then by token id.

    Returns:
        The num_return best, best first; fewer where the vocabulary and the length admit no more.

    Raises:
        ValueError: num_return does not lie in 1 to num_beams.
    """
    if not 1 <= num_return <= num_beams:
        raise ValueError(f"num_return is {num_return}, it must lie in 1 to num_beams ({num_beams})")
    prompt, beams, finished = [start_id, *prefix], [Hypothesis()], list[Hypothesis]()
    for length in range(1, max_new_tokens + 1):
        candidates = _extensions(next_logits, prompt, end_id, processors, beams, 2 * num_beams)
        done = [
            length == max_new_tokens or candidate.ids[-1] == end_id or stop(candidate.ids) for candidate in candidates
        ]
        finished += [candidate for candidate, ended in zip(candidates[:num_beams], done, strict=False) if ended]
        finished = sorted(finished, key=lambda h: -h.penalised_total(length_penalty))[:num_beams]
        beams = [candidate for candidate, ended in zip(candidates, done, strict=True) if not ended][:num_beams]
        if not beams:
            break
        if len(finished) == num_beams:
            best_length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
            bound = beams[0].total / math.pow(best_length, length_penalty)
            if early_stopping is True or bound <= finished[-1].penalised_total(length_penalty):
                break
    return finished[:num_return]


def _extensions(
    next_logits: NextLogits,
    prompt: Sequence[int],
    end_id: int,
    processors: Processors,
    beams: Sequence[Hypothesis],
    count: int,
) -> list[Hypothesis]:
    """The `count` one-token extensions of the beams with the highest totals, best first; impossible ones left out."""
    log_probs = log_softmax(next_logits([[*prompt, *hypothesis.ids] for hypothesis in beams]))  # (rows, V)
    processed = np.stack([processors(row, prompt, h.ids, end_id) for row, h in zip(log_probs, beams, strict=True)])
    totals = processed + np.array([[hypothesis.total] for hypothesis in beams])  # (rows, V)
    best = np.argsort(-totals, axis=None, kind="stable")[:count]
    rows, tokens = np.unravel_index(best, totals.shape)
    return [
        beams[row].extended(int(token), float(log_probs[row, token]), float(processed[row, token]))
        for row, token in zip(rows, tokens, strict=True)
        if totals[row, token] > -np.inf
    ]


def pytorch_steps(model: TranslationModel | CausalModel, source_ids: Sequence[int]) -> NextLogits:
    """The step over a PyTorch model: the encoder runs once, the decoder reads the whole prefix each time.

    Args:
        model: in evaluation mode.
        source_ids: one source. Of a causal model it is the text that is gone on with: its last token is the start token
            of what is read.
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
        rows = len(prefixes)
        decoded, _, _ = model.decode(target, _repeated(memory, rows), lengths.expand(rows))
        logits: Array = model.logits(decoded[:, -1]).cpu().numpy()  # (B, V)
        return logits

    return next_logits


def _causal_steps(model: CausalModel, read: Sequence[int]) -> NextLogits:
    """The step after what was read before."""

    @torch.inference_mode()
    def next_logits(prefixes: Sequence[Sequence[int]]) -> Array:
        ids = torch.tensor([[*read, *prefix] for prefix in prefixes], device=model.embedding.weight.device)
        features, _ = model.read(ids)
        logits: Array = model.logits(features[:, -1]).cpu().numpy()  # (B, V)
        return logits

    return next_logits


def _repeated(memory: Tensor | Memory, rows: int) -> Any:
    """What the encoder says of one source, for so many rows."""
    if isinstance(memory, Tensor):
        return memory.expand(rows, -1, -1)
    return Memory(*(part.expand(rows, *part.shape[1:]) for part in memory))
