import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from model.config import (
    ClassifierConfig,
    RecurrentConfig,
    TrainConfig,
    TransformerConfig,
    read_model_config,
    read_train_config,
    with_fields,
)


def test_fields_are_changed_each_by_its_own_type() -> None:
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
        ("cells", "lstm", "no field cells to set; it has dropout, max_positions, .*cell, "),
        ("vocab_size", "400", "no field vocab_size"),
        ("cell", "rnn", "cell is rnn, it must be one of gru, lstm"),
        ("bidirectional", "yes", "bidirectional is yes, it must be true or false"),
        ("decoder_size", "many", "decoder_size is many, it must be int"),
        ("decoder_size", "0", "decoder_size is 0, it must be at least 1"),
        ("dropout", "1", "dropout is 1.0, it must lie"),
    ],
)
def test_what_a_field_cannot_be_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_fields(RecurrentConfig(300), {name: text})


def test_labels_are_the_datas_own() -> None:
    with pytest.raises(ValueError, match="no field labels"):
        with_fields(ClassifierConfig(300), {"labels": "a,b"})


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.999}, r"dropout is 0.999, it must lie in \[0, 0.9\]"),
        ({"dropout": math.nan}, "dropout is nan"),
        ({"pad_id": 2}, "pad_id, bos_id, eos_id are 2, 1, 2, they must differ"),
        ({"bos_id": 300}, r"are 0, 300, 2, they must differ and lie below vocab_size \(300\)"),
        ({"pad_id": -1}, "pad_id is -1, it must be at least 0"),
        ({"d_model": 2**21}, "d_model is 2097152, it must be at least 1 and at most 1048576"),
        ({"d_model": "128"}, "d_model is '128', it must be of type int"),
        ({"pre_norm": 1}, "pre_norm is 1, it must be of type bool"),
    ],
)
def test_fields_that_no_model_can_have_are_refused_in_python_and_in_a_record_alike(
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
def test_the_ids_of_special_tokens_are_the_tokenizers_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"no field {name} to set"):
        with_fields(TransformerConfig(300), {name: "40"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sead": 2}', "has settings that this version does not know: sead"),
        ('{"seed": 1', "is not JSON"),
        ("[]", "is not an object of settings"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text, encoding="utf-8")
    for read in (read_train_config, read_model_config):
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} {message}"):
            read(path)


def test_a_record_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json lacks vocab_size"):
        read_model_config(tmp_path / "config.json")
