import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sightline.model.training.train_config import TrainConfig, read_train_config
from tests.support.tables import read_table


@pytest.mark.parametrize(("changes", "message"), read_table(__file__))
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
