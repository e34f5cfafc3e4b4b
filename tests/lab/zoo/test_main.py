"""Commands of the systems, in this process."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lab.zoo.__main__ import main
from lab.zoo.dialogues import CONDITIONS
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import CausalConfig, TransformerConfig
from sightline.model.data.tokenizer_training import train_tokenizer
from sightline.model.evaluation.defaults import TEST_SPLIT


def test_a_system_is_trained_with_other_settings_and_exported(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(corpus, tmp_path / "data" / "multi30k"))
    for path in data.glob("test.*"):
        path.rename(path.with_name(path.name.replace("test", TEST_SPLIT, 1)))
    (tmp_path / "mine.toml").write_text("vocab_size = 300\nepochs = 1\n", encoding="utf-8")
    fields = ("embedding_size=8", "encoder_size=8", "decoder_size=16", "attention_size=8")
    runs, small = ["--runs", str(tmp_path / "runs")], ["--config", str(tmp_path / "mine.toml"), "--model", *fields]
    options = ["--systems", "bahdanau", "--only-seed", "1"]
    assert main(["train", str(data.parent), *runs, *options, *small]) == 0
    scores = json.loads((tmp_path / "runs" / "bahdanau-1" / "scores.json").read_text(encoding="utf-8"))
    assert (scores["split"], len(scores["outputs"])) == (TEST_SPLIT, 6)
    (tmp_path / "text").write_text("A dog sleeps.\n", encoding="utf-8")
    out = ["--out", str(tmp_path / "bundles"), "--sentences", str(tmp_path / "text")]
    assert main(["export", str(tmp_path / "runs"), *out]) == 0
    assert (tmp_path / "bundles" / "multi30k-en-de-bahdanau" / "manifest.json").is_file()
    capsys.readouterr()
    assert main(["plan", str(data.parent), *runs, *options]) == 0
    assert "zoo, bahdanau: 0, " in capsys.readouterr().out


def test_recall_prints_and_writes_how_many_dialogues_keep_their_instruction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CausalConfig(300, d_model=16, num_heads=2, d_ff=16, layers=1)
    train_tokenizer(["User: Hello!\nBot: Good day."], 300).save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(1)
    weights = CausalModel(config).state_dict()
    save_checkpoint(tmp_path / "chat", config, weights, tmp_path / "tokenizer.json", {"epoch": 3})
    path = tmp_path / "recall.json"
    assert main(["recall", str(tmp_path / "chat"), "--turns", "1", "2", "--dialogues", "1", "--json", str(path)]) == 0
    line = "ending 0 of 1, greeting 0 of 1, figure 0 of 1, hobby 0 of 1, language 0 of 1, all 0 of 5"
    assert capsys.readouterr().out.splitlines()[:2] == [f"trained, turn 1: {line}", f"trained, turn 2: {line}"]
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["checkpoint"] == {"epoch": 3}
    assert list(report["turns"]) == list(CONDITIONS)
    assert report["turns"]["unseen values"].keys() == {"1", "2"}


def test_options_that_can_never_work_are_errors_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TransformerConfig(300, d_model=16, num_heads=2, d_ff=16, encoder_layers=1, decoder_layers=1)
    train_tokenizer(["Hello!"], 300).save(str(tmp_path / "tokenizer.json"))
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, config, Transformer(config).state_dict(), tmp_path / "tokenizer.json", {})
    for words, message in (
        (["recall", str(folder)], f"{folder} must be a chat model, but its architecture is transformer"),
        (["recall", str(folder), "--turns", "0"], "turns and dialogues must be at least 1, got 0 and 10"),
        (["train", str(tmp_path), "--runs", str(tmp_path / "runs"), "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["train", str(tmp_path), "--runs", str(tmp_path / "runs"), "--processes", "0"], "processes must be at least"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
