"""Parallel text: reading it, and batches of pairs of like length, reproducible from a seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Pair = tuple[list[int], list[int]]  # source ids and target ids, the end token last in both


def read_lines(path: Path) -> list[str]:
    r"""Read the lines of a UTF-8 file, without their ends and without a byte order mark; an empty file has none.

    A line ends with a line feed, or with a carriage return and a line feed. All else, a lone carriage return too, is
    text: the lines of a parallel corpus correspond by their numbers, so no tool may count them differently.

    Raises:
        ValueError: the file is not UTF-8; the message names the line.
    """
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8; convert the file to UTF-8"
        ) from None
    lines = text.removeprefix("\ufeff").split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_parallel(folder: Path, split: str, source: str, target: str) -> tuple[list[str], list[str]]:
    """Read `split.source` and `split.target`.

    Raises:
        FileNotFoundError: one of the files is missing.
        ValueError: a file is empty or not UTF-8, or the sides have different numbers of lines.
    """
    sides = []
    for language in (source, target):
        path = folder / f"{split}.{language}"
        if not path.is_file():
            raise FileNotFoundError(f"no {path}: expected one sentence a line, the same number on both sides")
        sides.append(read_lines(path))
        if not sides[-1]:
            raise ValueError(f"{path} is empty: expected one sentence a line")
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{folder / split}.{source} has {len(sides[0])} lines, {split}.{target} has {len(sides[1])}: line N of one "
            "must translate line N of the other"
        )
    return sides[0], sides[1]


@dataclass(frozen=True)
class Batch:
    """Padded pairs: `source` (B, S); `target_input` (B, T) starts with the start token; `target_output` (B, T)."""

    source: Tensor
    source_lengths: Tensor  # (B,)
    target_input: Tensor
    target_output: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


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
