import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from sightline.model.training.train_config import TrainConfig, read_train_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_learning_rate": math.nan}, "peak_learning_rate must be a finite number, got nan"),
        ({"peak_learning_rate": math.inf}, "peak_learning_rate must be a finite number, got inf"),
        ({"peak_learning_rate": -1.0}, "peak_learning_rate must be greater than 0 and at most 1, got -1.0"),
        ({"peak_learning_rate": 0.0}, "peak_learning_rate must be greater than 0 and at most 1, got 0.0"),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0, got 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a finite number, got nan"),
        ({"label_smoothing": math.nan}, "label_smoothing must be a finite number, got nan"),
        ({"label_smoothing": 0.95}, "label_smoothing must be at least 0 and at most 0.9, got 0.95"),
        ({"max_length_tokens": 0}, "max_length_tokens must be at least 1, got 0"),
        ({"max_length_tokens": 4097}, r"max_length_tokens must be at most batch_tokens \(4096\), got 4097"),
        ({"average_last": 0}, "average_last must be at least 1, got 0"),
        ({"precision": "float16"}, "precision must be one of float32, bfloat16, got float16"),
        ({"seed": -1}, "seed must be between 0 and 4294967295, got -1"),
        ({"seed": 2**32}, "seed must be between 0 and 4294967295, got 4294967296"),
        ({"seed": True}, "seed must be of type int, got True"),
        ({"max_epochs": 1.5}, "max_epochs must be of type int, got 1.5"),
        ({"max_minutes": -1.0}, "max_minutes must be at least 0, got -1.0"),
        ({"checkpoint_minutes": math.nan}, "checkpoint_minutes must be a finite number, got nan"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"evaluate_epochs": 0}, "evaluate_epochs must be at least 1, got 0"),
        ({"threads": -1}, "threads must be at least 0, got -1"),
        ({"checkpoint_steps": -1}, "checkpoint_steps must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_train_are_rejected_in_python_and_in_files(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TrainConfig(), **changes)
    path = tmp_path / "train.json"
    path.write_text(json.dumps({**dataclasses.asdict(TrainConfig()), **changes}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
        read_train_config(path)


def test_settings_of_systems_in_the_files_of_earlier_versions_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    settings = {"max_epochs": 3, "source": "en", "target": "de", "vocab_size": 6000, "tensorboard": True}
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert read_train_config(path) == TrainConfig(max_epochs=3)
    path.write_text(json.dumps({"vocabulary": 3}), encoding="utf-8")
    with pytest.raises(ValueError, match="unknown fields: vocabulary"):
        read_train_config(path)
