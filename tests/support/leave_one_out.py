"""Effect of removing one source token on the tokens of a translation.

Shapes use B batch, S source, T target, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.model.architectures.factory import TranslationModel
from sightline.model.architectures.recurrent import Memory
from sightline.model.decoding.reference import greedy, pytorch_steps

MAX_NEW_TOKENS = 64
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Effect:
    """Effect of removing each source token on each target token."""

    drops: FloatArray  # (T, S), decrease of the log-probability in nats
    predictions: NDArray[np.int64]  # (T, S), the most likely token after the removal


@dataclass(frozen=True)
class Explained:
    """A model's greedy translation with its attention weights and the effects of removals."""

    target: Sequence[int]
    log_probs: FloatArray  # (T,)
    weights: FloatArray  # (T, S), cross-attention averaged over layers and heads
    effects: Mapping[str, Effect]  # by the name of the removal: "deleted" or "hidden"


def deleted(model: TranslationModel, source: Sequence[int]) -> Any:
    """Encode the source without each of its tokens in turn."""
    rows = [[*source[:index], *source[index + 1 :]] for index in range(len(source))]
    memory, _ = model.encode(torch.tensor(rows), _lengths(source))
    return memory


def hidden(model: TranslationModel, source: Sequence[int]) -> Any:
    """Encode the whole source and drop each position in turn, so that the remaining weights sum to
    1.
    """
    memory, _ = model.encode(torch.tensor([source]), torch.tensor([len(source)]))
    if isinstance(memory, Memory):
        size = len(source)
        state, context = (part.expand(size, -1) for part in (memory.state, memory.context))
        return Memory(_without_each(memory.annotations), _without_each(memory.keys), state, context)
    return _without_each(memory)


REMOVALS: Mapping[str, Callable[[TranslationModel, Sequence[int]], Any]] = {"deleted": deleted, "hidden": hidden}


@torch.inference_mode()
def explain(model: TranslationModel, source: Sequence[int], target: Sequence[int] = ()) -> Explained:
    """Score a target with each source token removed in turn.

    Args:
        model: A model in evaluation mode whose attention weights do not depend on positions.
        source: At least two token ids; the last is the end token.
        target: Token ids; the greedy translation if there are none.
    """
    config = model.config
    target = target or greedy(pytorch_steps(model, source), config.bos_id, config.eos_id, MAX_NEW_TOKENS).ids
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
    kept = [[other for other in range(size) if other != index] for index in range(size)]
    return rows[0, torch.tensor(kept)]


def _forced(
    model: TranslationModel, memory: Any, lengths: Tensor, target: Sequence[int], need_weights: bool = False
) -> tuple[NDArray[np.int64], FloatArray, Tensor | None]:
    """Return the most likely tokens (B, T), the target's log-probabilities (B, T), and the cross
    weights if needed.
    """
    rows = lengths.size(0)
    prefix = torch.tensor([[model.config.bos_id, *target[:-1]]]).expand(rows, -1)
    features, _, cross = model.decode(prefix, memory, lengths, need_weights)
    log_probs = model.logits(features).double().log_softmax(dim=-1)  # (B, T, V)
    targets = torch.tensor([target]).expand(rows, -1).unsqueeze(-1)
    return log_probs.argmax(dim=-1).numpy(), log_probs.gather(-1, targets).squeeze(-1).numpy(), cross
