import re
from pathlib import Path

import pytest

from sightline.model.config import read_model_config
from sightline.model.training.options import read_train_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sead": 2}', "has unknown fields: sead; remove them|: unknown key sead"),
        ('{"seed": 1', "is not valid JSON"),
        ("[]", "must contain a JSON object"),
    ],
)
def test_an_invalid_file_is_rejected_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text, encoding="utf-8")
    for read in (read_train_config, read_model_config):
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} ?({message})"):
            read(path)
