"""Greedy decoding of many sequences at once, without a cache.

The results are those of `model.decoding.reference.greedy` for each sequence alone, unless two
tokens are almost equally likely: padding changes the order of sums.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from model.architectures.causal import CausalModel
from model.architectures.factory import TranslationModel
from model.architectures.llama import Llama
from model.architectures.recurrent import Memory
from model.data.batches import pad

# Maps indices of sequences and their ids so far to the logits (B, V) of their next tokens.
NextLogits = Callable[[Sequence[int], Sequence[Sequence[int]]], Tensor]


@torch.inference_mode()
def translate_greedily(
    model: TranslationModel, sources: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """Return the generated ids of each source, with the end token if it was generated.

    Args:
        model: in evaluation mode.
        sources: token ids with the end token, at most `max_positions`.
        max_new_tokens: largest number of generated tokens; at most `max_positions`.
    """
    assert not model.training
    config, device = model.config, model.embedding.weight.device
    lengths = torch.tensor([len(source) for source in sources], device=device)
    memory: Any  # its type depends on the model
    memory, _ = model.encode(pad(sources, config.pad_id).to(device), lengths)

    def next_logits(indices: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        chosen = torch.tensor(indices, device=device)
        decoded, _, _ = model.decode(torch.tensor(rows, device=device), _rows(memory, chosen), lengths[chosen])
        return model.logits(decoded[:, -1])

    starts = [[config.bos_id]] * len(sources)
    return _generate(next_logits, starts, [config.eos_id], max_new_tokens, config.max_positions + 1)


@torch.inference_mode()
def continue_greedily(
    model: CausalModel | Llama, prompts: Sequence[Sequence[int]], end_ids: Collection[int], max_new_tokens: int
) -> list[list[int]]:
    """Return the generated ids of each prompt, with the end token if it was generated.

    A sequence also ends when prompt and generated ids have `max_positions` tokens.

    Args:
        model: in evaluation mode.
        prompts: token ids.
        end_ids: tokens that end a sequence.
        max_new_tokens: largest number of generated tokens.
    """
    assert not model.training
    device = next(model.parameters()).device

    def next_logits(indices: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor:
        features, _ = model.hidden_states(pad(rows, model.config.pad_id).to(device))  # (B, T, M)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        return model.logits(features[torch.arange(len(rows), device=device), last])

    return _generate(next_logits, prompts, end_ids, max_new_tokens, model.config.max_positions)


def _generate(
    next_logits: NextLogits,
    starts: Sequence[Sequence[int]],
    end_ids: Collection[int],
    max_new_tokens: int,
    max_length: int,
) -> list[list[int]]:
    """Extend each sequence by the most likely tokens until its end."""
    rows = [list(start) for start in starts]
    for _ in range(max_new_tokens):
        is_open = [
            len(row) < max_length and (len(row) == len(start) or row[-1] not in end_ids)
            for row, start in zip(rows, starts, strict=True)
        ]
        indices = [index for index, one in enumerate(is_open) if one]
        if not indices:
            break
        chosen = next_logits(indices, [rows[index] for index in indices]).argmax(dim=-1)
        for index, token in zip(indices, chosen.tolist(), strict=True):
            rows[index].append(token)
    return [row[len(start) :] for row, start in zip(rows, starts, strict=True)]


def _rows(memory: Tensor | Memory, indices: Tensor) -> Any:
    """Return some rows of the encoder's output of a batch."""
    return memory[indices] if isinstance(memory, Tensor) else Memory(*(part[indices] for part in memory))
