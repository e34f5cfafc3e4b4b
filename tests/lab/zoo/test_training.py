import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.zoo.systems import COMPARED, GROUPS, PLAN, SMALL_GROUPS, SST2, SYSTEMS, System
from lab.zoo.training import (
    changed_system,
    planned_runs,
    run_processes,
    train,
    train_and_score,
    with_fields,
)
from sightline.base.errors import UsageError
from sightline.model.architectures.factory import build_model
from sightline.model.config import ClassifierConfig, RecurrentConfig, TransformerConfig
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.training.options import TrainConfig, make_config
from tests.support.tables import read_table

VOCABULARY = 6000
# Options of the command train by default.
DEFAULTS: dict[str, Any] = {
    "groups": None,
    "only_seed": None,
    "seeds": None,
    "processes": 1,
    "config": None,
    "model": [],
}


def num_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in build_model(SYSTEMS[name].make_config(VOCABULARY)).parameters())


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_can_start_training(name: str) -> None:
    assert SYSTEMS[name].make_config(VOCABULARY).vocab_size == VOCABULARY
    assert make_config({**SYSTEMS[name].settings, "seed": 2}).seed == 2


@pytest.mark.parametrize("name", sorted(COMPARED.keys() - {"post-norm"}))
def test_compared_systems_differ_by_at_most_a_tenth_in_their_parameters(name: str) -> None:
    assert num_parameters(name) == pytest.approx(num_parameters("post-norm"), rel=0.1)


def test_all_systems_except_the_base_transformer_are_planned() -> None:
    assert set(PLAN) == set(SYSTEMS) - {"transformer-base"}
    assert {name for name, plan in PLAN.items() if plan.seeds == 3 and plan.group == "zoo"} == set(COMPARED)
    assert all(plan.seeds == 3 for plan in PLAN.values() if plan.group != "zoo")


def test_a_fixed_context_has_as_many_parameters_when_it_is_only_the_initial_state() -> None:
    assert num_parameters("small-initial-state") == pytest.approx(num_parameters("small-fixed-context"), rel=0.02)


TOY = {"vocab_size": 280}


def toy(vocab_size: int) -> RecurrentConfig:
    return RecurrentConfig(
        vocab_size, embedding_size=8, encoder_size=8, decoder_size=16, attention_size=8, max_positions=64
    )


def test_a_run_is_trained_and_scored_once(corpus: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    for path in data.glob("test.*"):
        path.rename(path.with_name(path.name.replace("test", TEST_SPLIT, 1)))
    config = TrainConfig(epochs=1, batch_tokens=400, seed=2)
    system, run = System("a toy", toy, TOY), tmp_path / "run"
    train_and_score(system, config, data, run)
    written = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    assert (written["split"], written["num_beams"], len(written["outputs"])) == (TEST_SPLIT, 5, 6)
    assert json.loads((run / "train.json").read_text(encoding="utf-8"))["seed"] == 2
    (run / "scores.json").write_text("{}", encoding="utf-8")
    train_and_score(system, config, data, run)
    assert (run / "scores.json").read_text(encoding="utf-8") == "{}"
    assert len((run / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_a_classifier_is_scored_by_its_accuracy(tmp_path: Path, toy_sentences: list[str]) -> None:
    for split, texts in (("train", toy_sentences), ("dev", toy_sentences[1:])):
        rows = [{"text": text, "label": ("negative", "positive")[index % 2]} for index, text in enumerate(texts)]
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    def make(vocab_size: int) -> ClassifierConfig:
        return ClassifierConfig(vocab_size, d_model=16, num_heads=2, d_ff=16)

    system = System("a toy", make, TOY, "classification", SST2)
    train_and_score(system, TrainConfig(epochs=1, batch_tokens=400), tmp_path, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "scores.json").read_text(encoding="utf-8"))
    assert (written["split"], written["metrics"]["accuracy"]["examples"]) == ("dev", len(toy_sentences) - 1)


def test_a_file_and_fields_change_a_system(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('vocab_size = 300\nepochs = 1\nbatch_tokens = "auto"\n', encoding="utf-8")
    system = changed_system("fixed-context", tmp_path / "mine.toml", {"cell": "lstm"})
    model, config = system.make_config(300), make_config(system.settings)
    assert isinstance(model, RecurrentConfig) and (model.cell, model.attention) == ("lstm", "none")
    assert (config.epochs, config.batch_tokens, system.settings["vocab_size"]) == (1, 2000, 300)
    with pytest.raises(UsageError, match="unknown field cells"):
        changed_system("fixed-context", None, {"cells": "lstm"})


def test_a_resumed_run_keeps_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {}

    def remember(system: System, config: TrainConfig, data: Path, run: Path) -> None:
        begun[run.name] = config.precision

    monkeypatch.setattr("lab.zoo.training.train_and_score", remember)
    (tmp_path / "bahdanau-1").mkdir()
    (tmp_path / "bahdanau-1" / "train.json").write_text("{}", encoding="utf-8")  # older than the setting
    (tmp_path / "bahdanau-1" / "state.safetensors").touch()
    options = {**DEFAULTS, "systems": ["bahdanau"], "seeds": 2, "precision": "bfloat16"}
    train(argparse.Namespace(data=tmp_path, runs=tmp_path, **options))
    assert begun == {"bahdanau-1": "float32", "bahdanau-2": "bfloat16"}


def test_seed_1_of_every_system_comes_before_seed_2_of_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr("lab.zoo.training.train_and_score", lambda *arguments: order.append(arguments[-1].name))
    systems = ["bahdanau", "linformer", "post-norm"]
    options = {**DEFAULTS, "systems": systems, "precision": "float32"}
    train(argparse.Namespace(data=tmp_path, runs=tmp_path, **options))
    seed_1 = ["bahdanau-1", "linformer-1", "post-norm-1"]
    assert order == [*seed_1, "bahdanau-2", "post-norm-2", "bahdanau-3", "post-norm-3"]


def test_groups_are_trained_in_the_order_in_which_they_are_named() -> None:
    runs = planned_runs(None, ["order", "context"], None)
    assert runs[0] == (1, "small-positions-none")
    assert len(runs) == 3 * sum(len(SMALL_GROUPS[group]) for group in ("order", "context"))
    assert [seed for seed, _ in runs] == sorted(seed for seed, _ in runs)
    assert {name for _, name in planned_runs(None, GROUPS, 1)} == set(PLAN)
    assert {PLAN[name].group for _, name in planned_runs(None, None, 1)} == {"zoo"}
    assert planned_runs(["small-dot"], None, 1) == [(1, "small-dot")]


def test_processes_train_the_runs_that_are_not_finished_and_name_those_that_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "small-bahdanau-1").mkdir(parents=True)
    (tmp_path / "runs" / "small-bahdanau-1" / "scores.json").write_text("{}", encoding="utf-8")
    arguments = argparse.Namespace(data=tmp_path / "none", runs=tmp_path / "runs", precision="float32")
    vars(arguments).update({**DEFAULTS, "processes": 2})
    with pytest.raises(ValueError, match=r"2 of 3 runs failed: post-norm-1, post-norm-2; see"):
        run_processes([(1, "small-bahdanau"), (1, "post-norm"), (2, "post-norm")], arguments)
    assert "missing file" in (tmp_path / "runs" / "post-norm-1.out").read_text(encoding="utf-8")
    assert "small-bahdanau" not in capsys.readouterr().out


def test_each_field_is_parsed_by_its_type() -> None:
    config = with_fields(RecurrentConfig(300), {"cell": "lstm", "dropout": "0.5", "bidirectional": "false"})
    assert config == RecurrentConfig(300, cell="lstm", dropout=0.5, bidirectional=False)
    linear = TransformerConfig(300, encoder_attention="linformer")
    changes = {"linformer_sharing": "headwise", "linformer_size": "16"}
    assert with_fields(linear, changes) == TransformerConfig(
        300, encoder_attention="linformer", linformer_sharing="headwise", linformer_size=16
    )


@pytest.mark.parametrize(("name", "text", "message"), read_table(__file__))
def test_invalid_values_of_fields_are_rejected(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_fields(RecurrentConfig(300), {name: text})


def test_labels_cannot_be_changed_as_a_field() -> None:
    with pytest.raises(ValueError, match="unknown field labels;"):
        with_fields(ClassifierConfig(300), {"labels": "a,b"})


@pytest.mark.parametrize("name", ["pad_id", "bos_id", "eos_id"])
def test_the_ids_of_special_tokens_come_from_the_tokenizer(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field {name};"):
        with_fields(TransformerConfig(300), {name: "40"})
