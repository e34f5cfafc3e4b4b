import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sightline.model.config import TransformerConfig, read_model_config
from tests.support.tables import read_table


@pytest.mark.parametrize(("changes", "message"), read_table(__file__))
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
    with pytest.raises(ValueError, match=r"config\.json lacks the required field vocab_size"):
        read_model_config(tmp_path / "config.json")
