"""Settings of a training run: immutable, validated, and stored in the folder of the run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sightline.model.config_fields import (
    Count,
    LearningRate,
    Limit,
    Minutes,
    Norm,
    Probability,
    Seed,
    check_fields,
    from_fields,
    read_fields,
    to_json,
)

Precision = Literal["float32", "bfloat16"]
Metric = Literal["loss", "accuracy", "macro_f1"]
# Settings that may change when a run is resumed: none of them changes what an update does. The
# learning rate depends on the number of the update, not on the length of the run.
CHANGEABLE = frozenset(
    {
        "max_epochs",
        "max_minutes",
        "patience_epochs",
        "evaluate_epochs",
        "average_last",
        "checkpoint_minutes",
        "checkpoint_steps",
        "threads",
    }
)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run, by default the Multi30k recipe of Wu et al. 2021 with half its
    batch size.
    """

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
    max_minutes: Minutes = 0.0  # limit of the training time, over all resumes; 0 means no limit
    accumulate: Count = 1  # batches of an update
    evaluate_epochs: Count = 1  # epochs between two validations
    checkpoint_minutes: Minutes = 4.0  # minutes between checkpoints within an epoch; 0 means none
    checkpoint_steps: Limit = 0  # updates between checkpoints within an epoch; 0 means none
    threads: Limit = 0  # threads of PyTorch on the CPU; 0 means its default
    lora: Limit = 0  # rank of the low-rank updates that are trained instead of the weights; 0 means none
    metric: Metric = "loss"  # value of dev that determines the best epoch

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_length_tokens > self.batch_tokens:
            raise ValueError(
                f"max_length_tokens must be at most batch_tokens ({self.batch_tokens}), got {self.max_length_tokens}: "
                "the longest example must fit into a batch; increase batch_tokens, or decrease max_length_tokens"
            )


def goal_of(metric: str) -> str:
    """Return the name of the value of dev that determines the best epoch."""
    return "dev loss" if metric == "loss" else f"{metric.replace('_f1', ' F1')} of dev"


# Settings that earlier versions wrote.
_LEFT_OUT = ("source", "target", "vocab_size", "tensorboard")


def changed_settings(earlier: TrainConfig, later: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by name, with both values."""
    before, after = dataclasses.asdict(earlier), dataclasses.asdict(later)
    return {name: (value, after[name]) for name, value in before.items() if after[name] != value}


def train_config_to_json(config: TrainConfig) -> str:
    return to_json(dataclasses.asdict(config))


def read_train_config(path: Path) -> TrainConfig:
    """Read what `train_config_to_json` wrote; missing settings get their defaults. A `ValueError`
    names the file and the field.
    """
    fields = {name: value for name, value in read_fields(path).items() if name not in _LEFT_OUT}
    return from_fields(TrainConfig, fields, path)
