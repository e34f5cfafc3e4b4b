import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from model.training.config import TrainConfig, read_train_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_learning_rate": math.nan}, "peak_learning_rate is nan, it must be a finite number"),
        ({"peak_learning_rate": math.inf}, "peak_learning_rate is inf, it must be a finite number"),
        ({"peak_learning_rate": -1.0}, r"peak_learning_rate is -1.0, it must lie in \(0, 1\]"),
        ({"peak_learning_rate": 0.0}, r"peak_learning_rate is 0.0, it must lie in \(0, 1\]"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0, it must be above 0"),
        ({"clip_norm": math.nan}, "clip_norm is nan, it must be a finite number"),
        ({"label_smoothing": math.nan}, "label_smoothing is nan"),
        ({"label_smoothing": 0.95}, r"label_smoothing is 0.95, it must lie in \[0, 0.9\]"),
        ({"max_length_tokens": 0}, "max_length_tokens is 0, it must be at least 1"),
        ({"seed": -1}, "seed is -1, it must be at least 0 and at most 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296, it must be at least 0"),
        ({"seed": True}, "seed is True, it must be of type int"),
        ({"max_epochs": 1.5}, "max_epochs is 1.5, it must be of type int"),
        ({"target": "en"}, "source and target are both en"),
    ],
)
def test_settings_that_cannot_train_are_refused_in_python_and_in_a_record_alike(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TrainConfig(), **changes)
    path = tmp_path / "train.json"
    path.write_text(json.dumps({**dataclasses.asdict(TrainConfig()), **changes}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
        read_train_config(path)
