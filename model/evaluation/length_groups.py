"""Batches for evaluation, which have no random order."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from sightline.model.data.batches import pad
from sightline.model.data.tokenizer_training import encode_lines, truncate

MAX_TOKENS = 4096  # padded tokens of a batch


def grouped(lengths: Sequence[int], max_tokens: int = MAX_TOKENS) -> Iterator[list[int]]:
    """Yield groups of indices of sequences of similar length, shortest first, with at most
    `max_tokens` padded tokens, or one sequence.
    """
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if group and lengths[index] * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids (B, longest), padded on the right, and their lengths (B,)."""
    return pad(rows, pad_id).to(device), torch.tensor([len(row) for row in rows], device=device)


@torch.inference_mode()
def outputs_of(model: Any, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the output of a model for each row of token ids, on the CPU. If there is one for each
    token, those of padding may follow.
    """
    outputs = dict[int, Tensor]()
    for group in grouped(list(map(len, rows))):
        batch = padded([rows[index] for index in group], model.config.pad_id, device_of(model))
        outputs.update(zip(group, model(*batch).cpu(), strict=True))
    return [outputs[index] for index in range(len(rows))]


def encode_truncated(tokenizer: Tokenizer, texts: Sequence[str], max_positions: int) -> list[list[int]]:
    """Return the token ids of texts, of which a model reads the first ones."""
    return [truncate(tokenizer, ids, max_positions) for ids in encode_lines(tokenizer, texts)]


def encode_fitting(tokenizer: Tokenizer, texts: Sequence[str], max_positions: int) -> list[list[int]]:
    """Return the token ids of texts. Raises `ValueError` for a text that is too long."""
    rows = encode_lines(tokenizer, texts)
    for number, row in enumerate(rows, start=1):
        if len(row) > max_positions:
            raise ValueError(
                f"text {number} must have at most {max_positions} tokens (max_positions), got {len(row)}; shorten it"
            )
    return rows
