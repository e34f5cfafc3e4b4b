"""Settings of a training run: frozen, checked when they are made, and stored in the run's folder."""

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
    """How to train. The defaults are the Multi30k recipe of Wu et al. 2021 at half its batch."""

    source: str = "en"  # file ending of the source side: train.en, val.en
    target: str = "de"
    vocab_size: Size = 6000
    max_epochs: Count = 150
    batch_tokens: Count = 4096  # padded tokens of the longer side in one batch
    peak_learning_rate: LearningRate = 3.5e-3  # the recipe's 5e-3, over sqrt(2) for half the batch
    warmup_steps: Count = 2000
    label_smoothing: Probability = 0.1
    clip_norm: Norm = 25.0
    patience_epochs: Count = 15  # epochs without a better validation loss before training stops
    average_last: Count = 10  # checkpoints averaged for the final weights
    max_length_tokens: Count = 128  # longer examples are left out, in validation too
    seed: Seed = 1
    precision: Precision = (
        "float32"  # of products: "bfloat16" is faster where the processor has it, see docs/training.md
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source}; they must be two different file endings")
        if self.max_length_tokens > self.batch_tokens:
            raise ValueError(
                f"max_length_tokens ({self.max_length_tokens}) exceeds batch_tokens ({self.batch_tokens}): "
                "a single pair would not fit a batch"
            )


def train_config_to_json(config: TrainConfig) -> str:
    return to_json(dataclasses.asdict(config))


def read_train_config(path: Path) -> TrainConfig:
    """Read what `train_config_to_json` wrote; settings that were added later have their defaults.

    Raises:
        ValueError: the file is not such a record, or a value is not allowed; the message names the file and the field.
    """
    return from_fields(TrainConfig, read_fields(path), path)
