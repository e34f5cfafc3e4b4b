"""Padded batches of examples of similar length, reproducible from a seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Pair = tuple[list[int], list[int]]  # source ids and target ids, the end token last in both
LabelledExample = tuple[list[int], int]  # source ids, the end token last, and the number of the label


@dataclass(frozen=True)
class Batch:
    """Padded pairs: `source` (B, S); `target_input` (B, T) starts with the start token; `target_output` (B, T)."""

    source: Tensor
    source_lengths: Tensor  # (B,)
    target_input: Tensor
    target_output: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class LabelledBatch:
    """Padded sources (B, S), their lengths and their labels (B,)."""

    source: Tensor
    source_lengths: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "LabelledBatch":
        return LabelledBatch(self.source.to(device), self.source_lengths.to(device), self.labels.to(device))


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """(B, longest) int64, padded on the right."""
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
    """Indices of examples in batches of like length, at most `batch_tokens` padded tokens on the longest side.

    Examples of equal lengths, and the batches, come in an order drawn from the seed.

    Args:
        lengths: of each example's sides; the first side decides before the second.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    order = np.array(sorted(order, key=lambda i: lengths[i]))  # stable: ties stay shuffled
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


def iterate(pairs: Sequence[Pair], batch_tokens: int, seed: int, pad_id: int, bos_id: int) -> Iterator[Batch]:
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
