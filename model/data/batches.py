"""Padded batches of examples of similar length, in an order determined by a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.model.config import ArchitectureConfig, ClassifierConfig, PretrainedConfig
from sightline.model.data.examples import Example
from sightline.model.data.tags import NO_TAG


@dataclass(frozen=True)
class TensorBatch:
    """Padded examples as tensors."""

    def to(self, device: torch.device) -> Self:
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Batch(TensorBatch):
    """Padded token ids of pairs: `source` (B, S), `target_output` (B, T), and `target_input`
    (B, T), the target shifted right by the start token.
    """

    source: Tensor
    source_lengths: Tensor  # (B,)
    target_input: Tensor
    target_output: Tensor


@dataclass(frozen=True)
class LabelledBatch(TensorBatch):
    """Padded token ids of sources (B, S), their lengths (B,), and labels: indices (B,), or 0 and 1
    for each label (B, C) if a text has any number of labels, or indices of tags (B, S).
    """

    source: Tensor
    source_lengths: Tensor
    labels: Tensor


def pad(rows: Sequence[Sequence[int] | NDArray[np.int64]], pad_id: int) -> Tensor:
    """Pad token ids on the right to an int64 tensor (B, longest)."""
    padded = np.full((len(rows), max(len(row) for row in rows)), pad_id, np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


def make_batch(pairs: Sequence[Example], config: ArchitectureConfig) -> Batch:
    """Return a batch of translation pairs for a model with a configuration."""
    return Batch(
        source=pad([source for source, _ in pairs], config.pad_id),
        source_lengths=torch.tensor([len(source) for source, _ in pairs]),
        target_input=pad([[config.bos_id, *target[:-1]] for _, target in pairs], config.pad_id),
        target_output=pad([target for _, target in pairs], config.pad_id),
    )


def make_labelled_batch(examples: Sequence[Example], config: ArchitectureConfig) -> LabelledBatch:
    """Return a batch of texts for a classifier with a configuration."""
    assert isinstance(config, ClassifierConfig | PretrainedConfig)
    sources = [source for source, _ in examples]
    if config.multi_label:
        labels = torch.zeros(len(examples), len(config.labels))
        for row, (_, indices) in zip(labels, examples, strict=True):
            row[list(indices)] = 1.0
    else:
        labels = torch.tensor([int(label) for _, (label,) in examples])
    return LabelledBatch(pad(sources, config.pad_id), torch.tensor([len(source) for source in sources]), labels)


def make_tagged_batch(examples: Sequence[Example], config: ArchitectureConfig) -> LabelledBatch:
    """Return a batch whose labels (B, S) are the indices of tags from 0 on, or `NO_TAG - 1`."""
    sources, tags = ([example[side] for example in examples] for side in (0, 1))
    return LabelledBatch(pad(sources, config.pad_id), torch.tensor(list(map(len, sources))), pad(tags, NO_TAG) - 1)


def bucket(sizes: NDArray[np.int32], batch_tokens: int, seed: int) -> list[NDArray[np.int64]]:
    """Group examples of similar length into batches, as arrays of indices. The seed determines the
    order of the batches and of examples with equal lengths.

    Args:
        sizes: (N, K), the number of tokens of each side of each example. Examples are sorted by the
            first side, then by the next.
        batch_tokens: largest number of padded tokens of the longest side of a batch. A longer
            example is a batch of its own.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(sizes))
    order = order[np.lexsort(sizes[order].T[::-1])]  # the sort is stable, so ties stay shuffled
    starts, longest, start = [0], 0, 0
    for index, width in enumerate(sizes[order].max(axis=1).tolist()):
        longest = max(longest, width)
        if index > start and longest * (index - start + 1) > batch_tokens:
            starts.append(index)
            start, longest = index, width
    batches = np.split(order, starts[1:])
    rng.shuffle(batches)  # a list is shuffled in place
    return batches
