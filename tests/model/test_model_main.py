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

from sightline.__main__ import main
from sightline.model.checkpoint import load_metadata
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.training.trainer import Trainer

PAIRS = ("--source", "en", "--target", "de", "--size", "tiny", "--vocab-size", 300)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Runner":
    return Runner(monkeypatch, capsys)


class Runner:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Run a command; return exit code, standard output and standard error."""
        self.monkeypatch.setattr(sys, "argv", ["sightline", *map(str, arguments)])
        self.capsys.readouterr()
        code = main()
        return code, *self.capsys.readouterr()


def test_evaluate_prints_two_scores_with_their_signatures_and_writes_its_report_as_json(
    run: Runner, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    options = ("--split", "test", "--num-beams", 2, "--limit", 2, "--json", path)
    code, out, _ = run("evaluate", checkpoint, corpus, *options)
    assert code == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["metrics"]["BLEU"]["examples"] == len(report["outputs"]) == 2
    assert report["checkpoint"] == {"epoch": 1}
    lines = out.splitlines()
    assert [line.partition("  ")[0].strip() for line in lines[3:6]] == ["chrF", "BLEU", "tok-lc BLEU"]
    for line, name, tokens in zip(lines[6:9], ("chrF", "BLEU", "tok-lc BLEU"), ("", "13a", "none"), strict=True):
        assert line == f"{name}: 2 beams, length penalty 1, {report['metrics'][name]['signature']}"
        assert (f"|tok:{tokens}|" in line) == bool(tokens)


def test_evaluate_says_when_the_tokenised_score_is_omitted(run: Runner, checkpoint: Path, corpus: Path) -> None:
    code, out, err = run("evaluate", checkpoint, corpus, "--split", "val", "--num-beams", 1, "--limit", 1)
    assert code == 0 and "tok-lc" not in out
    assert f"note: tok-lc BLEU is not computed, because {corpus / 'val.lc.norm.tok.de'} is missing\n" in err


def test_evaluate_takes_the_validation_split_of_a_folder_for_training(
    run: Runner, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    for name in ("train.en", "train.de", "val.en", "val.de"):  # the files that the README names
        shutil.copy(corpus / name, tmp_path)
    code, out, err = run("evaluate", checkpoint, tmp_path, "--num-beams", 1, "--limit", 1)
    assert code == 0
    assert out.startswith(f"evaluated on {tmp_path / 'val.en'}\n")
    assert f"note: evaluating on val, which also decided when training stopped, because {tmp_path / TEST_SPLIT}" in err


def test_evaluate_prefers_the_test_split_of_multi30k(
    run: Runner, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    for side in ("en", "de"):
        shutil.copy(corpus / f"val.{side}", tmp_path)
        shutil.copy(corpus / f"val.{side}", tmp_path / f"{TEST_SPLIT}.{side}")
    code, _, err = run("evaluate", checkpoint, tmp_path, "--num-beams", 1, "--limit", 1)
    assert code == 0
    assert f"{TEST_SPLIT}.lc.norm.tok.de is missing" in err
    assert "note: evaluating" not in err


def test_evaluate_names_the_missing_files_and_the_option(run: Runner, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "val.en").write_text("A dog runs.\n", encoding="utf-8")
    result = run("evaluate", checkpoint, tmp_path)
    assert_one_line(result, f"missing {tmp_path / TEST_SPLIT}.en, {tmp_path / TEST_SPLIT}.de, ")
    assert f"{tmp_path / 'val.de'}; add SPLIT.en and SPLIT.de" in result[2]
    assert "--split SPLIT (make evaluate ARGS='--split SPLIT')" in result[2]


@pytest.mark.parametrize(
    "command", ["train $(TASK) $(DATA) --run $(RUN)", "evaluate $(RUN) $(DATA)", "export $(RUN) --out $(BUNDLE)"]
)
def test_make_passes_all_options(command: str) -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert f"sightline {command} $(ARGS)\n" in makefile


def assert_one_line(result: tuple[int, str, str], message: str, expected: int = 2) -> None:
    code, out, err = result
    assert code == expected
    assert out == ""
    *before, last = err.splitlines()
    assert last.startswith("error: ") and message in last
    assert not before or before[0].startswith("examples: ")  # of a training


def test_a_missing_checkpoint_or_split_is_an_error_of_one_line(
    run: Runner, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    assert_one_line(run("evaluate", tmp_path / "none", corpus), "is not a checkpoint")
    assert_one_line(run("evaluate", checkpoint, corpus, "--split", "none"), "none.en")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-beams", "0", "--num-beams must be a whole number, at least 1, got '0'"),
        ("--limit", "0", "--limit must be a whole number, at least 1, got '0'"),
        ("--length-penalty", "nan", "--length-penalty must be a number, got 'nan'"),
    ],
)
def test_impossible_options_are_errors_of_one_line(
    run: Runner, checkpoint: Path, corpus: Path, option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("evaluate", checkpoint, corpus, "--split", "test", option, value)
    errors = run.capsys.readouterr().err
    assert_one_line((stopped.value.code, "", errors), message)  # type: ignore[arg-type]


def test_a_source_longer_than_the_model_is_an_error_of_one_line(run: Runner, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "long.en").write_text("word " * 500 + "\n", encoding="utf-8")
    (tmp_path / "long.de").write_text("Wort\n", encoding="utf-8")
    assert_one_line(run("evaluate", checkpoint, tmp_path, "--split", "long"), "max_positions", 1)


def test_arguments_that_do_not_parse_exit_with_code_2(run: Runner) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("evaluate")
    assert stopped.value.code == 2


def test_a_classifier_is_not_scored_as_a_translation(run: Runner, classifier_checkpoint: Path, corpus: Path) -> None:
    assert_one_line(
        run("evaluate", classifier_checkpoint, corpus, "--split", "test"),
        "--split is for translation only; omit it for classification",
    )


def test_insufficient_memory_is_an_error_of_one_line(
    run: Runner, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.model.train_command.Trainer", lambda *_, **__: torch.empty(2**50))
    result = run("train", "translation", corpus, "--run", tmp_path / "run", *PAIRS)
    assert_one_line(result, "out of memory; use a smaller model or a smaller --batch-tokens: ", 1)


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_run_that_cannot_be_a_folder_is_an_error_of_one_line(
    run: Runner, corpus: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("mine\n", encoding="utf-8")
    result = run("train", "translation", corpus, "--run", tmp_path / name, *PAIRS)
    assert_one_line(result, f"cannot write to the folder {tmp_path / name}")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine\n"


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of one epoch; copy it before changing a file."""
    path = tmp_path_factory.mktemp("trained") / "run"
    arguments = ["train", "translation", corpus, "--run", path, *PAIRS, "--epochs", 1]
    assert main(list(map(str, arguments))) == 0
    return path


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("state.safetensors", lambda whole: whole[: len(whole) // 2], "state.safetensors is damaged"),
        ("train.json", lambda whole: whole.replace(b'"seed"', b'"sead"'), "train.json: unknown key sead"),
        ("train.json", lambda whole: whole[:40], "train.json is not valid JSON"),
        ("config.json", lambda whole: b"[]", "config.json must contain a JSON object"),
        ("tokenizer.json", lambda whole: whole[:40], "tokenizer.json is not a tokenizer"),
    ],
)
def test_a_damaged_run_is_an_error_of_one_line(
    run: Runner, corpus: Path, trained: Path, name: str, change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = shutil.copytree(trained, tmp_path / "run") / name
    path.write_bytes(change(path.read_bytes()))
    arguments = ("train", "translation", corpus, "--run", tmp_path / "run", *PAIRS, "--epochs", 2)
    assert_one_line(run(*arguments), message, 1)


def test_a_second_process_leaves_the_first_ones_run_alone(run: Runner, corpus: Path, tmp_path: Path) -> None:
    """Two processes in one folder must not remove each other's files."""
    settings = ("--batch-tokens", 256, "--patience-epochs", 100_000)
    arguments = ("train", "translation", corpus, "--run", tmp_path / "run", *settings, *PAIRS)
    command = [sys.executable, "-m", "sightline", *map(str, arguments), "--epochs", "100000"]
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
            result = run(*arguments, "--epochs", 100_000)
            assert_one_line(result, f"another process is using {tmp_path / 'run'}; wait until it ends", 1)
            assert first.poll() is None
        finally:
            first.kill()
    # The lock ended with the process.
    epochs = load_metadata(tmp_path / "run" / "state.safetensors")["epoch"]
    assert run(*arguments, "--epochs", epochs + 1)[0] == 0
    assert load_metadata(tmp_path / "run" / "state.safetensors")["epoch"] == epochs + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_and_the_run_can_be_resumed(
    run: Runner, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    settings = ("--epochs", 1)
    arguments = ("train", "translation", corpus, "--run", tmp_path / "run", *settings, *PAIRS)
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
    assert err.splitlines()[-1] == (
        "error: interrupted; the run is saved at epoch 1, step 1; run the same command again to resume it"
    )
    code, out, err = run(*arguments)
    assert (code, out) == (0, "")
    assert "\nresuming at epoch 1, step 1\n" in err
    assert load_metadata(tmp_path / "run" / "state.safetensors")["epoch"] == 1
