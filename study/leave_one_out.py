"""What becomes of a translation's tokens when one token of the source is taken away.

Shapes use S source, T target.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.architectures.factory import TranslationModel
from model.architectures.recurrent import Memory, RecurrentModel
from model.decoding.reference import greedy, pytorch_steps

MAX_NEW_TOKENS = 64
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Effect:
    """Of the absence of each token of the source on each token of the target."""

    drops: FloatArray  # (T, S), by how much the log-probability falls, nats
    predictions: NDArray[np.int64]  # (T, S), the likeliest token then


@dataclass(frozen=True)
class Explained:
    """A model's own translation, what it attended to, and what depends on what."""

    target: Sequence[int]
    log_probs: FloatArray  # (T,)
    weights: FloatArray  # (T, S), cross-attention, the mean over layers and heads
    effects: Mapping[str, Effect]  # by the name of the removal


def deleted(model: TranslationModel, source: Sequence[int]) -> Any:
    """Memories of the sources that lack one token: the encoder does not read it either."""
    rows = [[*source[:place], *source[place + 1 :]] for place in range(len(source))]
    memory, _ = model.encode(torch.tensor(rows), _lengths(source))
    return memory


def hidden(model: TranslationModel, source: Sequence[int]) -> Any:
    """Memories of the whole source of which the decoder lacks one place, so that the other weights sum to 1 again."""
    memory, _ = model.encode(torch.tensor([source]), torch.tensor([len(source)]))
    if isinstance(memory, Memory):
        size = len(source)
        state, context = (part.expand(size, -1) for part in (memory.state, memory.context))
        return Memory(_without_each(memory.annotations), _without_each(memory.keys), state, context)
    return _without_each(memory)


REMOVALS: Mapping[str, Callable[[TranslationModel, Sequence[int]], Any]] = {"deleted": deleted, "hidden": hidden}


def check(model: TranslationModel) -> None:
    """Refuse what these removals mean nothing for.

    Raises:
        ValueError: the model has no attention, or its weights depend on where a token stands.
    """
    if isinstance(model, RecurrentModel):
        config = model.config
        if config.attention in ("none", "location") or config.window != "global":
            raise ValueError(f"attention {config.attention}, {config.window}: nothing to hide, or places that matter")


@torch.inference_mode()
def explain(model: TranslationModel, source: Sequence[int]) -> Explained:
    """Translate greedily, then force that translation with each token of the source taken away in turn.

    Args:
        model: in evaluation mode, see `check`.
        source: two tokens or more, the end token last.
    """
    config = model.config
    target = greedy(pytorch_steps(model, source), config.bos_id, config.eos_id, MAX_NEW_TOKENS).ids
    lengths = torch.tensor([len(source)])
    memory, _ = model.encode(torch.tensor([source]), lengths)
    _, log_probs, cross = _forced(model, memory, lengths, target, need_weights=True)
    assert cross is not None
    effects = {}
    for name, remove in REMOVALS.items():
        likeliest, without, _ = _forced(model, remove(model, source), _lengths(source), target)
        effects[name] = Effect((log_probs - without).T, likeliest.T)
    weights = cross.mean(dim=(0, 2))[0].double().numpy()  # from (L, 1, H, T, S)
    return Explained(target, log_probs[0], weights, effects)


def _lengths(source: Sequence[int]) -> Tensor:
    return torch.full((len(source),), len(source) - 1)


def _without_each(rows: Tensor) -> Tensor:
    """(1, S, M) to (S, S - 1, M)."""
    size = rows.size(1)
    kept = [[other for other in range(size) if other != place] for place in range(size)]
    return rows[0, torch.tensor(kept)]


def _forced(
    model: TranslationModel, memory: Any, lengths: Tensor, target: Sequence[int], need_weights: bool = False
) -> tuple[NDArray[np.int64], FloatArray, Tensor | None]:
    """The likeliest tokens (B, T), the target's log-probabilities (B, T), and the cross weights where wanted."""
    rows = lengths.size(0)
    prefix = torch.tensor([[model.config.bos_id, *target[:-1]]]).expand(rows, -1)
    features, _, cross = model.decode(prefix, memory, lengths, need_weights)
    log_probs = model.logits(features).double().log_softmax(dim=-1)  # (B, T, V)
    wanted = torch.tensor([target]).expand(rows, -1).unsqueeze(-1)
    return log_probs.argmax(dim=-1).numpy(), log_probs.gather(-1, wanted).squeeze(-1).numpy(), cross


def kendall_tau(left: FloatArray, right: FloatArray) -> FloatArray:
    """Tau-b (Kendall 1945) of each row of two matrices (T, S); 0 where all entries of a row are equal."""
    signs = [np.sign(matrix[:, :, None] - matrix[:, None, :]) for matrix in (left, right)]  # (T, S, S)
    agreement = (signs[0] * signs[1]).sum(axis=(1, 2))
    pairs = np.sqrt(np.abs(signs[0]).sum(axis=(1, 2)) * np.abs(signs[1]).sum(axis=(1, 2)))
    tau: FloatArray = np.divide(agreement, pairs, out=np.zeros_like(agreement), where=pairs > 0)
    return tau
