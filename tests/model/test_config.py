import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from sightline.model.config import TransformerConfig, read_model_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.999}, "dropout must be at least 0 and at most 0.9, got 0.999"),
        ({"dropout": math.nan}, "dropout must be a finite number, got nan"),
        ({"pad_id": 2}, r"pad_id, bos_id, eos_id must be different and less than vocab_size \(300\), got 2, 1, 2"),
        ({"bos_id": 300}, r"must be different and less than vocab_size \(300\), got 0, 300, 2"),
        ({"pad_id": -1}, "pad_id must be at least 0, got -1"),
        ({"d_model": 2**21}, "d_model must be between 1 and 1048576, got 2097152"),
        ({"d_model": "128"}, "d_model must be of type int, got '128'"),
        ({"pre_norm": 1}, "pre_norm must be of type bool, got 1"),
    ],
)
def test_impossible_fields_are_rejected_in_python_and_in_files(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = TransformerConfig(300)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**dataclasses.asdict(config), **changes}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{message}"):
        read_model_config(path)


def test_a_file_without_its_vocabulary_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json lacks the required fields vocab_size"):
        read_model_config(tmp_path / "config.json")
