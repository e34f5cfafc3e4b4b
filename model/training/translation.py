"""Translation as a task: parallel text, and the cross-entropy of target tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from model.architectures.factory import TranslationModel, cross_entropy, training_loss
from model.config import ModelConfig, TrainConfig
from model.data.batches import Batch, Pair, iterate, read_parallel
from model.data.tokenizer import encode_lines
from model.training.task import Task


def _read_sides(folder: Path, split: str, config: TrainConfig) -> tuple[list[str], list[str]]:
    """Read a split to learn from.

    Raises:
        ValueError: a line is blank: nothing can be learnt from a sentence without its translation.
    """
    sides = read_parallel(folder, split, config.source, config.target)
    for language, lines in zip((config.source, config.target), sides, strict=True):
        blank = [number for number, line in enumerate(lines, start=1) if not line.strip()]
        if blank:
            raise ValueError(
                f"{folder / split}.{language}, line {blank[0]} is blank, one of {len(blank)} blank lines; remove these "
                f"lines from both {split}.{config.source} and {split}.{config.target}"
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
    return iterate(pairs, batch_tokens, seed, config.pad_id, config.bos_id)


def count_targets(batch: Batch, pad_id: int) -> int:
    return int((batch.target_output != pad_id).sum())


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
