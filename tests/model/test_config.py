import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from sightline.model.config import ClassifierConfig, RecurrentConfig, TransformerConfig, read_model_config, with_fields


def test_each_field_is_parsed_by_its_type() -> None:
    config = with_fields(RecurrentConfig(300), {"cell": "lstm", "dropout": "0.5", "bidirectional": "false"})
    assert config == RecurrentConfig(300, cell="lstm", dropout=0.5, bidirectional=False)
    linear = TransformerConfig(300, encoder_attention="linformer")
    changes = {"linformer_sharing": "headwise", "linformer_size": "16"}
    assert with_fields(linear, changes) == TransformerConfig(
        300, encoder_attention="linformer", linformer_sharing="headwise", linformer_size=16
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cells", "lstm", "unknown field cells; the fields of this model are dropout, max_positions, .*cell, "),
        ("vocab_size", "400", "unknown field vocab_size;"),
        ("cell", "rnn", "cell must be one of gru, lstm, got rnn"),
        ("bidirectional", "yes", "bidirectional must be true or false, got yes"),
        ("decoder_size", "many", "decoder_size must be of type int, got many"),
        ("decoder_size", "0", "decoder_size must be between 1 and 1048576, got 0"),
        ("dropout", "1", "dropout must be at least 0 and at most 0.9, got 1.0"),
    ],
)
def test_invalid_values_of_fields_are_rejected(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_fields(RecurrentConfig(300), {name: text})


def test_labels_cannot_be_changed_as_a_field() -> None:
    with pytest.raises(ValueError, match="unknown field labels;"):
        with_fields(ClassifierConfig(300), {"labels": "a,b"})


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


@pytest.mark.parametrize("name", ["pad_id", "bos_id", "eos_id"])
def test_the_ids_of_special_tokens_come_from_the_tokenizer(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field {name};"):
        with_fields(TransformerConfig(300), {name: "40"})


def test_a_file_without_its_vocabulary_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json lacks the required fields vocab_size"):
        read_model_config(tmp_path / "config.json")
