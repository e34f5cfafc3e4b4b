import json
import re
from pathlib import Path
from typing import Any

import pytest

from sightline.model.training.options import TrainConfig, make_config, read_train_config
from tests.support.tables import read_table


@pytest.mark.parametrize(("changes", "message"), read_table(__file__))
def test_settings_that_cannot_train_are_rejected_in_python_and_in_files(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps({**TrainConfig().model_dump(), **changes}), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        read_train_config(path)
    if changes != {"seed": True}:
        with pytest.raises(ValueError, match=r"^--[a-z-]+:? must be "):
            make_config(changes)


def test_names_of_earlier_versions_are_read_and_settings_of_systems_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    settings = {"max_epochs": 3, "source": "en", "target": "de", "vocab_size": 6000, "tensorboard": True}
    path.write_text(json.dumps({**settings, "max_minutes": 5.0, "peak_learning_rate": 0.5}), encoding="utf-8")
    assert read_train_config(path) == TrainConfig(epochs=3, minutes=5.0, learning_rate=0.5)
    path.write_text(json.dumps({"vocabulary": 3}), encoding="utf-8")
    with pytest.raises(ValueError, match="unknown key vocabulary"):
        read_train_config(path)
