import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.bench.record import Result
from lab.study import speed
from lab.study.speed import DECODING_ROUNDS, SENTENCES, add_arguments, measure
from lab.study.speed_report import ratios, tables, training_minutes
from lab.zoo.data import read_data
from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.base.bundle import MANIFEST, read_manifest, write_manifest
from sightline.model.config import TransformerConfig
from sightline.model.training.train_config import PRECISIONS, TrainConfig
from sightline.model.training.trainer import Trainer
from sightline.model.training.translation import TRANSLATION
from tests.support.steps import parse


@pytest.fixture(scope="module")
def zoo(
    tmp_path_factory: pytest.TempPathFactory,
    bundle: Path,
    classifier_bundle: Path,
    toy_sentences: list[str],
) -> Path:
    """Create bundles of two systems, a run of one of them, and data."""
    folder = tmp_path_factory.mktemp("zoo")
    for name, one in (("transformer", bundle), ("sentiment", classifier_bundle)):
        copy = Path(shutil.copytree(one, folder / "bundles" / bundle_name(name)))
        write_manifest(copy, read_manifest(copy).model_copy(update={"name": bundle_name(name)}))
    data = folder / "data" / SYSTEMS["transformer"].corpus.folder
    data.mkdir(parents=True)
    for name in ("train.en", "train.de", "val.en", "val.de", SENTENCES):
        (data / name).write_text("\n".join(toy_sentences[name.startswith("val") :]) + "\n", encoding="utf-8")

    run, config = folder / "runs" / "transformer-1", TrainConfig(batch_tokens=128)
    prepared = read_data(SYSTEMS["transformer"], data, run, config, 300)
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}
    model_config = TransformerConfig(prepared.tokenizer.get_vocab_size(), **sizes)
    Trainer(run, config, TRANSLATION, prepared, model_config, torch.device("cpu"))
    epochs = [{"epoch": 1, "step": 100, "seconds": 40.0}, {"epoch": 2, "step": 200, "seconds": 50.0}]
    (run / "log.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs), encoding="utf-8")
    (run / "scores.json").write_text("{}", encoding="utf-8")
    return folder


def parsed(zoo: Path, *words: str) -> argparse.Namespace:
    folders = (str(zoo / name) for name in ("bundles", "runs", "data"))
    return parse(add_arguments, *folders, "--threads", "1", "--rounds", "2", *words)


def test_systems_are_measured_for_training_and_decoding_if_they_can(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "DECODING_S", 0.02)
    before = sorted((path, path.stat().st_mtime_ns) for path in (zoo / "runs").rglob("*"))
    settings, *rows = measure(parsed(zoo)).rows
    assert settings["threads"] == 1
    translating, classifying = rows
    assert (translating["system"], translating["precision"]) == ("transformer", "float32")
    assert (translating["updates"], translating["log_minutes"]) == (200, 1.5)
    assert translating["parameters"] == read_manifest(zoo / "bundles" / bundle_name("transformer")).parameters
    assert {precision: len(times) for precision, times in translating["update_ms"].items()} == dict.fromkeys(
        PRECISIONS, 2
    )
    assert min(time for times in translating["update_ms"].values() for time in times) > 0
    assert {count: len(speeds) for count, speeds in translating["tokens_per_s"].items()} == dict.fromkeys(
        ("1", "32"), 2 * DECODING_ROUNDS
    )
    assert set(classifying) == {"system", "parameters"}  # it has no run and generates no text
    assert sorted((path, path.stat().st_mtime_ns) for path in (zoo / "runs").rglob("*")) == before


def test_the_number_of_threads_is_restored(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_time_decoding", lambda *_: {})
    threads = torch.get_num_threads()
    measure(parsed(zoo, "--rounds", "1", "--threads", "2"))
    assert torch.get_num_threads() == threads


def test_a_folder_without_a_bundle_of_the_zoo_is_rejected(zoo: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no bundle of any system"):
        measure(argparse.Namespace(bundles=zoo / "data", runs=zoo / "runs", data=zoo / "data", rounds=1, threads=1))


def test_other_data_types_are_rejected(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / bundle_name("transformer")
    shutil.copytree(zoo / "bundles" / bundle_name("transformer"), folder)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    (folder / MANIFEST).write_text(json.dumps({**manifest, "dtype": "float16"}), encoding="utf-8")
    with pytest.raises(ValueError, match="must compute in float32 to be comparable, got float16"):
        measure(argparse.Namespace(bundles=tmp_path, runs=zoo / "runs", data=zoo / "data", rounds=1, threads=1))


def test_zero_rounds_are_rejected(zoo: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measure(parsed(zoo, "--rounds", "0"))


def test_training_takes_as_long_as_its_updates() -> None:
    times = {"float32": [400.0, 100.0, 300.0], "bfloat16": [200.0]}
    assert training_minutes({"update_ms": times, "updates": 3000, "precision": "float32"}) == 15
    assert training_minutes({"update_ms": times, "updates": 3000, "precision": "bfloat16"}) == 10


def test_speeds_are_compared_round_by_round() -> None:
    assert ratios([10.0, 20.0, 90.0], [10.0, 10.0, 90.0]) == [1, 2, 1]
    rows = (
        {"threads": 2, "updates_a_round": 3},
        {"system": "transformer", "parameters": 1, "tokens_per_s": {"1": [10.0, 10.0, 90.0]}},
        {"system": "bahdanau", "parameters": 2, "tokens_per_s": {"1": [10.0, 20.0, 90.0]}},
    )
    assert "| 1.00 (1.00 to 2.00) |" in tables(Result(rows=rows))["speed"]  # 2 is the ratio of the medians


def test_unmeasured_cells_are_empty() -> None:
    rows = (
        {"threads": 2, "updates_a_round": 3},
        {
            "system": "transformer",
            "parameters": 2093056,
            "updates": 6000,
            "log_minutes": 61.5,
            "precision": "bfloat16",
            "update_ms": {"float32": [400.0, 300.0, 500.0], "bfloat16": [250.0]},
            "tokens_per_s": {"1": [2000.0], "32": [9000.0]},
        },
        {"system": "bahdanau", "parameters": 2099840, "tokens_per_s": {"1": [3000.0], "32": [4500.0]}},
        {
            "system": "sentiment",
            "parameters": 1000,
            "updates": 600,
            "log_minutes": 2.4,
            "precision": "float32",
            "update_ms": {"float32": [100.0], "bfloat16": [99.0]},
        },
    )
    text = tables(Result(rows=rows))["speed"]
    assert "| `transformer` | 400 | 250 | 25 | 2,000 tokens/s | 9,000 tokens/s |" in text
    assert "| `bahdanau` |  |  |  | 1.50 (1.50 to 1.50) | 0.50 (0.50 to 0.50) |" in text
    assert "| `sentiment` | 100 | 99 | 1 |  |  |" in text
    assert "2 threads; medians of rounds in which all systems take turns: 3 of 3 updates, 1 of decoding." in text
    assert "The slowest round of updates takes up to 67% longer than the fastest." in text


def test_chat_systems_are_not_compared_with_translation_systems() -> None:
    settings = {"threads": 2, "updates_a_round": 3}
    names = ("transformer", "chat-gatt", "chat-baseline")
    rows = [{"system": name, "parameters": 1, "tokens_per_s": {"1": [9.0]}} for name in names]
    parts = tables(Result(rows=(settings, *rows)))
    assert "| `chat-gatt` |  |  |  | 9 tokens/s |" in parts["speed"]
    assert "`chat-baseline`" not in parts["speed"] and "| `chat-baseline` |" in parts["speed-all"]


def test_without_the_transformer_there_are_no_ratios() -> None:
    rows = (
        {"threads": 1, "updates_a_round": 3},
        {"system": "bahdanau", "parameters": 1, "tokens_per_s": {"1": [3000.0]}},
    )
    assert "| `bahdanau` |  |  |  | 3,000 tokens/s |" in tables(Result(rows=rows))["speed"]
