"""Translation task: parallel text, and the cross-entropy of target tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from model.architectures.factory import TranslationModel
from model.architectures.recurrent import RecurrentModel
from model.config import ModelConfig
from model.data.batches import Batch, Pair, iterate_batches
from model.data.text import read_parallel
from model.data.tokenizer import encode_lines
from model.training.config import TrainConfig
from model.training.hard_attention import marginal_loss, reinforce_loss
from model.training.loss import projected_cross_entropy
from model.training.task import Task


def _read_sides(folder: Path, split: str, config: TrainConfig) -> tuple[list[str], list[str]]:
    """Read both sides of a split.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a line is blank, or see `read_parallel`.
    """
    sides = read_parallel(folder, split, config.source, config.target)
    for language, lines in zip((config.source, config.target), sides, strict=True):
        blank = [number for number, line in enumerate(lines, start=1) if not line.strip()]
        if blank:
            raise ValueError(
                f"{folder / split}.{language}, line {blank[0]} is blank ({len(blank)} blank lines in total); remove "
                f"these lines from both {split}.{config.source} and {split}.{config.target}"
            )
    return sides


def _read_texts(folder: Path, config: TrainConfig) -> list[str]:
    source, target = _read_sides(folder, "train", config)
    return source + target


def _read_pairs(
    folder: Path, split: str, tokenizer: Tokenizer, config: TrainConfig, model_config: ModelConfig
) -> list[Pair]:
    source, target = _read_sides(folder, split, config)
    return list(zip(encode_lines(tokenizer, source), encode_lines(tokenizer, target), strict=True))


def _longer_side(pair: Pair) -> int:
    return max(map(len, pair))


def _batches(pairs: Sequence[Pair], batch_tokens: int, seed: int, config: ModelConfig) -> Iterator[Batch]:
    return iterate_batches(pairs, batch_tokens, seed, config.pad_id, config.bos_id)


def count_targets(batch: Batch, pad_id: int) -> int:
    return int((batch.target_output != pad_id).sum())


def cross_entropy(model: TranslationModel, batch: Batch, smoothing: float) -> Tensor:
    """Return the sum of the cross-entropies over the real target tokens, in nats."""
    memory: Any  # its type depends on the model
    memory, _ = model.encode(batch.source, batch.source_lengths)
    decoded, _, _ = model.decode(batch.target_input, memory, batch.source_lengths)
    return projected_cross_entropy(
        decoded.flatten(0, 1), model.embedding.weight, batch.target_output.flatten(), smoothing, model.config.pad_id
    )


def training_loss(model: TranslationModel, batch: Batch, smoothing: float) -> Tensor:
    """Return the training loss: a sum over the real target tokens of a batch, in nats."""
    if isinstance(model, RecurrentModel) and model.config.selection == "reinforce":
        return reinforce_loss(model, batch, smoothing)
    if isinstance(model, RecurrentModel) and model.config.selection == "marginal":
        return marginal_loss(model, batch, smoothing)
    return cross_entropy(model, batch, smoothing)


def _validation_loss(model: TranslationModel, batch: Batch) -> Tensor:
    return cross_entropy(model, batch, smoothing=0.0)


TRANSLATION: Task[Pair, Batch, TranslationModel] = Task(
    validation_split="val",
    read_texts=_read_texts,
    read_examples=_read_pairs,
    length=_longer_side,
    batches=_batches,
    count=count_targets,
    training_loss=training_loss,
    validation_loss=_validation_loss,
)
