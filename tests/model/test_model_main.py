"""Tests of the command line in this process: outputs and errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from sightline.model.__main__ import main
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.checkpoint import load_metadata, load_model, save_checkpoint
from sightline.model.config import CausalConfig
from sightline.model.data.dialogues import CONDITIONS
from sightline.model.data.tokenizer import train_tokenizer
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.training.trainer import Trainer

SMALL = ("--model", "d_model=16", "num_heads=2", "d_ff=16", "encoder_layers=1", "decoder_layers=1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Runner":
    return Runner(monkeypatch, capsys)


class Runner:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Run a command; return exit code, standard output and standard error."""
        self.monkeypatch.setattr(sys, "argv", ["python -m sightline.model", *map(str, arguments)])
        self.capsys.readouterr()
        code = main()
        return code, *self.capsys.readouterr()


def test_evaluate_prints_two_lines_with_their_signatures(run: Runner, checkpoint: Path, corpus: Path) -> None:
    code, out, _ = run("evaluate", checkpoint, corpus, "--split", "test", "--num-beams", 2, "--limit", 2)
    assert code == 0
    tokenised, detokenised = out.splitlines()
    assert tokenised.startswith("tok-lc: BLEU ")
    assert "tok:none" in tokenised
    assert "tok:13a" not in tokenised
    assert detokenised.startswith("detok, cased: BLEU ")
    assert "tok:13a" in detokenised
    assert "; chrF " in detokenised


def test_evaluate_says_when_the_tokenised_line_is_omitted(run: Runner, checkpoint: Path, corpus: Path) -> None:
    code, out, _ = run("evaluate", checkpoint, corpus, "--split", "val", "--num-beams", 1, "--limit", 1)
    assert code == 0
    assert out.startswith(
        f"tok-lc: not computed, because {corpus / 'val.lc.norm.tok.de'} is missing\ndetok, cased: BLEU "
    )


def test_evaluate_takes_the_validation_split_of_a_folder_for_training(
    run: Runner, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    for name in ("train.en", "train.de", "val.en", "val.de"):  # the files that the README names
        shutil.copy(corpus / name, tmp_path)
    code, out, err = run("evaluate", checkpoint, tmp_path, "--num-beams", 1, "--limit", 1)
    assert code == 0
    assert out.startswith(f"tok-lc: not computed, because {tmp_path / 'val.lc.norm.tok.de'} is missing\n")
    assert f"note: evaluating on val, which also decided when training stopped, because {tmp_path / TEST_SPLIT}" in err


def test_evaluate_prefers_the_test_split_of_multi30k(
    run: Runner, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    for side in ("en", "de"):
        shutil.copy(corpus / f"val.{side}", tmp_path)
        shutil.copy(corpus / f"val.{side}", tmp_path / f"{TEST_SPLIT}.{side}")
    code, out, err = run("evaluate", checkpoint, tmp_path, "--num-beams", 1, "--limit", 1)
    assert code == 0
    assert f"{TEST_SPLIT}.lc.norm.tok.de is missing" in out
    assert "note: " not in err


def test_evaluate_names_the_missing_files_and_the_option(run: Runner, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "val.en").write_text("A dog runs.\n", encoding="utf-8")
    result = run("evaluate", checkpoint, tmp_path)
    assert_one_line(result, f"missing {tmp_path / TEST_SPLIT}.en, {tmp_path / TEST_SPLIT}.de, ")
    assert f"{tmp_path / 'val.de'}; add SPLIT.en and SPLIT.de" in result[2]
    assert "--split SPLIT (make evaluate ARGS='--split SPLIT')" in result[2]


@pytest.mark.parametrize(
    "command",
    ["train $(TASK) $(DATA) --run $(RUN)", "evaluate $(RUN) $(DATA)", "export $(RUN) --out $(BUNDLE)"],
)
def test_make_passes_all_options(command: str) -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert f"sightline {command} $(ARGS)\n" in makefile


def test_evaluate_writes_its_report_as_json(run: Runner, checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run("evaluate", checkpoint, corpus, "--split", "test", "--num-beams", 1, "--limit", 2, "--json", path)
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["sentences"] == len(report["outputs"]) == 2
    assert report["checkpoint"] == {"epoch": 1}
    assert set(report["bleu"]) == set(report["chrf"]) == set(report["tokenised_bleu"]) == {"value", "signature"}


def assert_one_line(result: tuple[int, str, str], message: str, expected: int = 2) -> None:
    code, out, err = result
    assert code == expected
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_folder_without_a_checkpoint_is_an_error_of_one_line(run: Runner, corpus: Path, tmp_path: Path) -> None:
    assert_one_line(run("evaluate", tmp_path / "none", corpus), "is not a checkpoint")


def test_a_missing_split_is_an_error_of_one_line(run: Runner, checkpoint: Path, corpus: Path) -> None:
    assert_one_line(run("evaluate", checkpoint, corpus, "--split", "none"), "none.en")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-beams", "0", "num_beams must be at least 1, got 0"),
        ("--limit", "0", "limit must be at least 1, got 0"),
        ("--length-penalty", "nan", "length_penalty must be a finite number, got nan"),
    ],
)
def test_impossible_options_are_errors_of_one_line(
    run: Runner, checkpoint: Path, corpus: Path, option: str, value: str, message: str
) -> None:
    assert_one_line(run("evaluate", checkpoint, corpus, "--split", "test", option, value), message)


def test_a_source_longer_than_the_model_is_an_error_of_one_line(run: Runner, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "long.en").write_text("word " * 500 + "\n", encoding="utf-8")
    (tmp_path / "long.de").write_text("Wort\n", encoding="utf-8")
    assert_one_line(run("evaluate", checkpoint, tmp_path, "--split", "long"), "max_positions", 1)


def test_train_without_its_data_is_an_error_of_one_line(run: Runner, tmp_path: Path) -> None:
    assert_one_line(run("system", "transformer", tmp_path / "none", "--run", tmp_path / "run"), "train.en")


@pytest.mark.parametrize("seeds", [0, -1])
def test_a_zoo_of_no_seeds_is_an_error_of_one_line(run: Runner, tmp_path: Path, seeds: int) -> None:
    result = run("zoo", tmp_path, "--runs", tmp_path / "runs", "--seeds", seeds)
    assert_one_line(result, f"seeds must be at least 1, got {seeds}")
    assert not (tmp_path / "runs").exists()


def test_an_impossible_training_setting_is_an_error_of_one_line(run: Runner, corpus: Path, tmp_path: Path) -> None:
    result = run("system", "transformer", corpus, "--run", tmp_path / "run", "--max-epochs", 0)
    assert_one_line(result, "max_epochs must be at least 1, got 0")


def test_arguments_that_do_not_parse_exit_with_code_2(run: Runner) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("evaluate")
    assert stopped.value.code == 2


def test_train_takes_its_settings_from_the_command_line_and_resumes(run: Runner, corpus: Path, tmp_path: Path) -> None:
    arguments = ("system", "transformer", corpus, "--run", tmp_path / "run", "--vocab-size", 300, "--batch-tokens", 256)
    assert run(*arguments, "--max-epochs", 1)[0] == 0
    assert run(*arguments, "--max-epochs", 2)[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert_one_line(run(*arguments, "--seed", 5), "contains a run with other values of seed; choose")


def test_train_changes_the_given_fields_of_a_systems_model(run: Runner, corpus: Path, tmp_path: Path) -> None:
    settings = ("--vocab-size", 300, "--batch-tokens", 256, "--max-epochs", 1)
    sizes = ("embedding_size=8", "encoder_size=8", "decoder_size=16")
    arguments = ("system", "fixed-context", corpus, "--run", tmp_path / "run", *settings, "--model", *sizes)
    assert run(*arguments, "cell=lstm")[0] == 0
    model, _ = load_model(tmp_path / "run" / "averaged")
    assert isinstance(model, RecurrentModel) and isinstance(model.cell, nn.LSTMCell)
    assert (model.config.attention, model.config.dropout) == ("none", 0.3)  # the system's own
    assert_one_line(run(*arguments, "cell=gru"), "contains a run of another model; choose")
    assert_one_line(run(*arguments, "cells=gru"), "unknown field cells")


def test_a_field_without_a_value_does_not_parse(run: Runner, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("system", "transformer", tmp_path, "--run", tmp_path / "run", "--model", "cell")
    assert stopped.value.code == 2


def test_accuracy_prints_json(
    run: Runner, classifier_checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    (tmp_path / "dev.tsv").write_text("".join(f"1\t{text}\n" for text in toy_sentences), encoding="utf-8")
    code, out, _ = run("accuracy", classifier_checkpoint, tmp_path)
    assert code == 0
    report = json.loads(out)
    assert (report["split"], report["sentences"]) == ("dev", len(toy_sentences))
    assert report["accuracy"] == pytest.approx(100 * report["correct"] / report["sentences"], abs=0.01)
    low, high = report["interval_95"]
    assert low <= report["accuracy"] <= high


def test_accuracy_of_a_model_that_is_no_classifier_is_an_error_of_one_line(
    run: Runner, checkpoint: Path, tmp_path: Path
) -> None:
    assert_one_line(run("accuracy", checkpoint, tmp_path), "must be a classifier, but its architecture is transformer")


def test_a_classifier_is_not_scored_as_a_translation(run: Runner, classifier_checkpoint: Path, corpus: Path) -> None:
    assert_one_line(
        run("evaluate", classifier_checkpoint, corpus, "--split", "test"),
        "--split is for translation only; omit it for classification",
    )


def test_recall_prints_and_writes_how_many_dialogues_keep_their_instruction(run: Runner, tmp_path: Path) -> None:
    config = CausalConfig(300, d_model=16, num_heads=2, d_ff=16, layers=1)
    train_tokenizer(["User: Hello!\nBot: Good day."], 300).save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(1)
    weights = CausalModel(config).state_dict()
    save_checkpoint(tmp_path / "chat", config, weights, tmp_path / "tokenizer.json", {"epoch": 3})
    code, out, _ = run(
        "recall", tmp_path / "chat", "--turns", 1, 2, "--dialogues", 1, "--json", tmp_path / "recall.json"
    )
    assert code == 0
    line = "ending 0 of 1, greeting 0 of 1, figure 0 of 1, hobby 0 of 1, language 0 of 1, all 0 of 5"
    assert out.splitlines()[:2] == [f"trained, turn 1: {line}", f"trained, turn 2: {line}"]
    report = json.loads((tmp_path / "recall.json").read_text(encoding="utf-8"))
    assert report["checkpoint"] == {"epoch": 3}
    assert list(report["turns"]) == list(CONDITIONS)
    assert report["turns"]["unseen values"].keys() == {"1", "2"}


def test_recall_requires_a_chat_model_and_at_least_one_dialogue(run: Runner, checkpoint: Path) -> None:
    assert run("recall", checkpoint) == (
        2,
        "",
        f"error: {checkpoint} must be a chat model, but its architecture is transformer\n",
    )
    assert run("recall", checkpoint, "--turns", 0)[2] == "error: turns and dialogues must be at least 1, got 0 and 10\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--peak-learning-rate", "nan", "peak_learning_rate must be a finite number, got nan"),
        ("--peak-learning-rate", "-1", "peak_learning_rate must be greater than 0 and at most 1, got -1.0"),
        ("--clip-norm", "0", "clip_norm must be greater than 0, got 0.0"),
        ("--seed", "9" * 25, "seed must be between 0 and 4294967295, got 9999999999999999999999999"),
        ("--model", "pad_id=40", "unknown field pad_id;"),
        ("--model", "bos_id=900", "unknown field bos_id;"),
        ("--model", "dropout=0.999", "dropout must be at least 0 and at most 0.9, got 0.999"),
    ],
)
def test_settings_that_cannot_train_are_errors_of_one_line_and_start_no_run(
    run: Runner, corpus: Path, tmp_path: Path, option: str, value: str, message: str
) -> None:
    result = run("system", "transformer", corpus, "--run", tmp_path / "run", "--vocab-size", 300, option, value)
    assert_one_line(result, message)
    assert not (tmp_path / "run").exists()


def test_insufficient_memory_is_an_error_of_one_line(
    run: Runner, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.model.commands.Trainer", lambda *_: torch.empty(2**50))
    result = run("system", "transformer", corpus, "--run", tmp_path / "run")
    assert_one_line(result, "out of memory; use a smaller model or a smaller --batch-tokens: ", 1)


def test_a_system_that_generates_its_data_reads_no_folder(run: Runner, tmp_path: Path) -> None:
    """A folder that the system ignores must be an error."""
    result = run("system", "chat-gatt", "/nonexistent", "--run", tmp_path / "run")
    assert_one_line(result, "the system chat-gatt generates its training data; remove the argument /nonexistent")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("system", ["transformer", "sentiment"])
def test_a_system_that_reads_data_requires_their_folder(
    run: Runner, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.chdir(corpus)  # where data lie by chance
    result = run("system", system, "--run", tmp_path / "run")
    assert_one_line(
        result,
        f"the system {system} needs a folder of training data: python -m sightline.model system {system} DATA --run",
    )
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_the_data_cannot_fill_is_reported_as_smaller(
    run: Runner, corpus: Path, tmp_path: Path
) -> None:
    settings = ("--batch-tokens", 256, "--max-epochs", 1, "--vocab-size", 9000)
    code, _, err = run("system", "transformer", corpus, "--run", tmp_path / "run", *settings, *SMALL)
    model, _ = load_model(tmp_path / "run" / "averaged")
    assert code == 0 and model.config.vocab_size < 9000
    assert f"note: the vocabulary has {model.config.vocab_size} tokens instead of vocab_size (9000)" in err


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_run_that_cannot_be_a_folder_is_an_error_of_one_line(
    run: Runner, corpus: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("mine\n", encoding="utf-8")
    assert_one_line(run("system", "transformer", corpus, "--run", tmp_path / name), str(tmp_path / name))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("state.safetensors", lambda whole: whole[: len(whole) // 2], "state.safetensors is damaged"),
        ("train.json", lambda whole: whole.replace(b'"seed"', b'"sead"'), "has unknown fields: sead; remove them"),
        ("train.json", lambda whole: whole[:40], "train.json is not valid JSON"),
        ("config.json", lambda whole: b"[]", "config.json must contain a JSON object"),
        ("tokenizer.json", lambda whole: whole[:40], "tokenizer.json is not a tokenizer"),
    ],
)
def test_a_damaged_run_is_an_error_of_one_line(
    run: Runner, corpus: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    arguments = ("system", "transformer", corpus, "--run", tmp_path / "run", "--vocab-size", 300, *SMALL)
    assert run(*arguments, "--max-epochs", 1)[0] == 0
    path = tmp_path / "run" / name
    path.write_bytes(change(path.read_bytes()))
    assert_one_line(run(*arguments, "--max-epochs", 2), message, 1)


def test_a_second_process_leaves_the_first_ones_run_alone(run: Runner, corpus: Path, tmp_path: Path) -> None:
    """Two processes in one folder must not remove each other's files."""
    settings = ("--vocab-size", 300, "--batch-tokens", 256, "--patience-epochs", 100_000)
    arguments = ("system", "transformer", corpus, "--run", tmp_path / "run", *settings, *SMALL)
    command = [sys.executable, "-m", "sightline.model", *map(str, arguments), "--max-epochs", "100000"]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as first:
        try:
            log, deadline = tmp_path / "run" / "log.jsonl", time.monotonic() + 120
            while not log.exists() and time.monotonic() < deadline and first.poll() is None:
                time.sleep(0.02)
            result = run(*arguments, "--max-epochs", 100_000)
            assert_one_line(result, f"another process is using {tmp_path / 'run'}; wait until it ends", 1)
            assert first.poll() is None
        finally:
            first.kill()
    # The lock ended with the process.
    epochs = load_metadata(tmp_path / "run" / "state.safetensors")["epoch"]
    assert run(*arguments, "--max-epochs", epochs + 1)[0] == 0
    assert load_metadata(tmp_path / "run" / "state.safetensors")["epoch"] == epochs + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_and_the_run_can_be_resumed(
    run: Runner, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    settings = ("--vocab-size", 300, "--max-epochs", 1)
    arguments = ("system", "transformer", corpus, "--run", tmp_path / "run", *settings, *SMALL)
    update = Trainer.update

    def interrupted(trainer: Trainer, batches: list[object]) -> tuple[float, int]:
        signal.raise_signal(number)
        return update(trainer, batches)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "update", interrupted)
        # Processes that a shell starts in the background ignore SIGINT.
        previous = signal.signal(number, signal.default_int_handler)
        try:
            code, out, err = run(*arguments)
        finally:
            signal.signal(number, previous)
    assert (code, out) == (128 + number, "")
    assert err.splitlines()[1:] == [
        "error: interrupted; the run is saved at epoch 1, step 1; run the same command again to resume it"
    ]
    code, out, err = run(*arguments)
    assert (code, out) == (0, "")
    assert "\nresuming at epoch 1, step 1\n" in err
    assert load_metadata(tmp_path / "run" / "state.safetensors")["epoch"] == 1
