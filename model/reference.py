"""Greedy and beam decoding, slow and obvious: what every faster decoder must agree with.

Both take the step as a function, so the same loop runs over PyTorch, over ONNX Runtime or over a table in a test.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model.transformer import Transformer

# Prefixes, each beginning with the start token and all of one length, to the natural log-probabilities (rows, V) of
# the token that follows each of them, for one source.
NextLogProbs = Callable[[Sequence[Sequence[int]]], NDArray[np.float32]]


@dataclass(frozen=True)
class Hypothesis:
    """Generated tokens, the end token included where there is one, and the log-probability of each."""

    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """Sum of the tokens' log-probabilities."""
        return sum(self.log_probs)

    def penalised_score(self, length_penalty: float) -> float:
        """The sum divided by length ** length_penalty; the end token counts, the start token does not."""
        return self.score / math.pow(len(self.ids), length_penalty)

    def extended(self, token: int, log_prob: float) -> "Hypothesis":
        return Hypothesis((*self.ids, token), (*self.log_probs, log_prob))


@contextmanager
def one_thread() -> Iterator[None]:
    """Steps of a few rows gain nothing from more threads, and lose hundredfold where another process has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def greedy(next_log_probs: NextLogProbs, start_id: int, end_id: int, max_new_tokens: int) -> Hypothesis:
    """Take the likeliest token (the lowest id among equals) until the end token or `max_new_tokens`."""
    hypothesis = Hypothesis()
    while len(hypothesis.ids) < max_new_tokens and end_id not in hypothesis.ids:
        (row,) = next_log_probs([[start_id, *hypothesis.ids]])
        token = int(row.argmax())
        hypothesis = hypothesis.extended(token, float(row[token]))
    return hypothesis


def beam(
    next_log_probs: NextLogProbs,
    start_id: int,
    end_id: int,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    num_return: int = 1,
) -> list[Hypothesis]:
    """Beam search as `generate` of Hugging Face transformers (version 5) does it for encoder-decoder models.

    Each step ranks every one-token extension of the open beams by its sum of log-probabilities and looks at the first
    2 * num_beams. Those among the first num_beams that end with the end token are finished; one that ranks lower and
    ends is dropped. The first num_beams that do not end are the open beams of the next step. Of the finished, the
    num_beams with the best penalised score (`Hypothesis.penalised_score`) are kept. At `max_new_tokens` the first
    num_beams extensions are finished, ended or not.

    The search ends when num_beams are finished and, unless `early_stopping`, the best open beam's sum penalised at its
    present length is no better than the worst of them. For length_penalty > 0 a longer continuation could still come
    to beat that bound, so this is a heuristic, as it is there.

    Equals rank by the order of their beams, then by token id.

    Returns:
        The num_return best, best first; fewer where the vocabulary and the length admit no more.

    Raises:
        ValueError: num_return does not lie in 1 to num_beams.
    """
    if not 1 <= num_return <= num_beams:
        raise ValueError(f"num_return is {num_return}, it must lie in 1 to num_beams ({num_beams})")
    beams, finished = [Hypothesis()], list[Hypothesis]()
    for length in range(1, max_new_tokens + 1):
        candidates = _extensions(next_log_probs, start_id, beams, 2 * num_beams)
        done = [length == max_new_tokens or candidate.ids[-1] == end_id for candidate in candidates]
        finished += [candidate for candidate, ended in zip(candidates[:num_beams], done, strict=False) if ended]
        finished = sorted(finished, key=lambda h: -h.penalised_score(length_penalty))[:num_beams]
        beams = [candidate for candidate, ended in zip(candidates, done, strict=True) if not ended][:num_beams]
        if not beams or (
            len(finished) == num_beams
            and (
                early_stopping
                or beams[0].penalised_score(length_penalty) <= finished[-1].penalised_score(length_penalty)
            )
        ):
            break
    return finished[:num_return]


def _extensions(
    next_log_probs: NextLogProbs, start_id: int, beams: Sequence[Hypothesis], count: int
) -> list[Hypothesis]:
    """The `count` one-token extensions of the beams with the highest sums, best first."""
    log_probs = next_log_probs([[start_id, *hypothesis.ids] for hypothesis in beams])  # (rows, V)
    totals = log_probs + np.array([[hypothesis.score] for hypothesis in beams])  # (rows, V)
    best = np.argsort(-totals, axis=None, kind="stable")[:count]
    rows, tokens = np.unravel_index(best, totals.shape)
    return [
        beams[row].extended(int(token), float(log_probs[row, token])) for row, token in zip(rows, tokens, strict=True)
    ]


def pytorch_steps(model: Transformer, source_ids: Sequence[int]) -> NextLogProbs:
    """The step over a PyTorch model: the encoder runs once, the decoder reads the whole prefix each time.

    Args:
        model: in evaluation mode.
        source_ids: one source, the end token last.
    """
    assert not model.training
    device = model.embedding.weight.device
    with torch.inference_mode():
        lengths = torch.tensor([len(source_ids)], device=device)
        memory, _ = model.encode(torch.tensor([list(source_ids)], device=device), lengths)  # (1, S, M)

    @torch.inference_mode()
    def next_log_probs(prefixes: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        target = torch.tensor([list(prefix) for prefix in prefixes], device=device)  # (B, T)
        rows = len(prefixes)
        decoded, _, _ = model.decode(target, memory.expand(rows, -1, -1), lengths.expand(rows))
        log_probs: NDArray[np.float32] = model.logits(decoded[:, -1]).log_softmax(dim=-1).cpu().numpy()  # (B, V)
        return log_probs

    return next_log_probs
