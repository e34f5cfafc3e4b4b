"""Padded batches of examples of similar length, in an order determined by a seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Pair = tuple[list[int], list[int]]  # source and target token ids, both ending with the end token
LabelledExample = tuple[list[int], int]  # source token ids, ending with the end token, and the index of the label


@dataclass(frozen=True)
class Batch:
    """Padded token ids of translation pairs.

    `source` is (B, S). `target_input` (B, T) is the target shifted right by the start token;
    `target_output` (B, T) is the target.
    """

    source: Tensor
    source_lengths: Tensor  # (B,)
    target_input: Tensor
    target_output: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class LabelledBatch:
    """Padded token ids of sources (B, S), their lengths (B,) and label indices (B,)."""

    source: Tensor
    source_lengths: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "LabelledBatch":
        return LabelledBatch(self.source.to(device), self.source_lengths.to(device), self.labels.to(device))


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Pad token ids on the right to an int64 tensor (B, longest)."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows])


def make_batch(pairs: Sequence[Pair], pad_id: int, bos_id: int) -> Batch:
    return Batch(
        source=pad([source for source, _ in pairs], pad_id),
        source_lengths=torch.tensor([len(source) for source, _ in pairs]),
        target_input=pad([[bos_id, *target[:-1]] for _, target in pairs], pad_id),
        target_output=pad([target for _, target in pairs], pad_id),
    )


def bucket(lengths: Sequence[tuple[int, ...]], batch_tokens: int, seed: int) -> list[list[int]]:
    """Group examples of similar length into batches.

    The seed determines the order of the batches and of examples with equal lengths.

    Args:
        lengths: for each example, the number of tokens of each side. Examples are sorted by the
            first side, then by the second.
        batch_tokens: largest number of padded tokens of the longest side of a batch. A longer
            example is a batch of its own.
        seed: seed of the random order.

    Returns:
        The batches, each a list of indices of examples.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    order = np.array(sorted(order, key=lambda i: lengths[i]))  # the sort is stable, so ties stay shuffled
    batches: list[list[int]] = [[]]
    longest = 0
    for index in order:
        longest = max(longest, *lengths[index])
        if batches[-1] and longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = max(lengths[index])
        batches[-1].append(int(index))
    rng.shuffle(batches)
    return batches


def iterate_batches(pairs: Sequence[Pair], batch_tokens: int, seed: int, pad_id: int, bos_id: int) -> Iterator[Batch]:
    lengths = [(len(target), len(source)) for source, target in pairs]
    for indices in bucket(lengths, batch_tokens, seed):
        yield make_batch([pairs[i] for i in indices], pad_id, bos_id)


def iterate_labelled(
    examples: Sequence[LabelledExample], batch_tokens: int, seed: int, pad_id: int
) -> Iterator[LabelledBatch]:
    for indices in bucket([(len(source),) for source, _ in examples], batch_tokens, seed):
        sources = [examples[i][0] for i in indices]
        lengths, labels = torch.tensor([len(source) for source in sources]), [examples[i][1] for i in indices]
        yield LabelledBatch(pad(sources, pad_id), lengths, torch.tensor(labels))
