import json
from pathlib import Path

import pytest

from model.__main__ import train_and_score
from model.config import RecurrentConfig, TrainConfig
from model.factory import build_model
from model.translation import TRANSLATION
from model.zoo import PLAN, SYSTEMS, System

VOCABULARY = 6000
COMPARED = ("post-norm", "bahdanau", "fixed-context", "luong-general")


def num_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in build_model(SYSTEMS[name].make_config(VOCABULARY)).parameters())


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_can_be_begun(name: str) -> None:
    assert SYSTEMS[name].make_config(VOCABULARY).vocab_size == VOCABULARY
    TrainConfig(**SYSTEMS[name].training)


@pytest.mark.parametrize("name", COMPARED[1:])
def test_systems_that_are_compared_have_as_many_parameters_within_a_tenth(name: str) -> None:
    assert num_parameters(name) == pytest.approx(num_parameters("post-norm"), rel=0.1)


def test_all_that_translate_are_planned_but_transformers_that_take_longer() -> None:
    translating = {name for name, system in SYSTEMS.items() if system.task is TRANSLATION}
    assert set(PLAN) == translating - {"transformer", "transformer-base"}
    assert {name for name, planned in PLAN.items() if planned.seeds == 3} == set(COMPARED)


def toy(vocab_size: int) -> RecurrentConfig:
    return RecurrentConfig(vocab_size, embedding_size=8, encoder_size=8, decoder_size=16, attention_size=8)


def test_a_run_is_trained_and_scored_once(corpus: Path, tmp_path: Path) -> None:
    config = TrainConfig(vocab_size=280, max_epochs=1, batch_tokens=400, seed=2)
    system, run = System(toy), tmp_path / "run"
    train_and_score(system, config, corpus, run, split="test")
    written = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    assert (written["split"], written["num_beams"], len(written["outputs"])) == ("test", 5, 6)
    assert json.loads((run / "train.json").read_text(encoding="utf-8"))["seed"] == 2
    (run / "scores.json").write_text("{}", encoding="utf-8")
    train_and_score(system, config, corpus, run, split="test")
    assert (run / "scores.json").read_text(encoding="utf-8") == "{}"
    assert len((run / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 1
