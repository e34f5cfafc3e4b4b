"""Settings of a training run: immutable, validated, and stored in the folder of the run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from model.fields import (
    Count,
    LearningRate,
    Norm,
    Probability,
    Seed,
    Size,
    check_fields,
    from_fields,
    read_fields,
    to_json,
)

Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    The defaults are the Multi30k recipe of Wu et al. 2021 with half its batch size.
    """

    source: str = "en"  # file extension of the source language: train.en, val.en
    target: str = "de"
    vocab_size: Size = 6000
    max_epochs: Count = 150
    batch_tokens: Count = 4096  # padded tokens of the longer side of a batch
    peak_learning_rate: LearningRate = 3.5e-3  # 5e-3 of the recipe, divided by sqrt(2) for half the batch size
    warmup_steps: Count = 2000
    label_smoothing: Probability = 0.1
    clip_norm: Norm = 25.0
    patience_epochs: Count = 15  # epochs without a lower validation loss before training stops
    average_last: Count = 10  # number of epochs whose weights are averaged
    max_length_tokens: Count = 128  # longer examples are skipped, also in validation
    seed: Seed = 1
    # Precision of matrix products. "bfloat16" is faster on processors that support it, see
    # docs/research/training.md.
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.source == self.target:
            raise ValueError(f"source and target must be different file extensions, got {self.source} for both")
        if self.max_length_tokens > self.batch_tokens:
            raise ValueError(
                f"max_length_tokens must be at most batch_tokens ({self.batch_tokens}), got {self.max_length_tokens}: "
                "the longest pair must fit into a batch"
            )


def train_config_to_json(config: TrainConfig) -> str:
    return to_json(dataclasses.asdict(config))


def read_train_config(path: Path) -> TrainConfig:
    """Read what `train_config_to_json` wrote; missing settings get their defaults.

    Raises:
        ValueError: the file is not a JSON object, a setting is unknown, or a value is not allowed;
            the message names the file and the field.
    """
    return from_fields(TrainConfig, read_fields(path), path)
