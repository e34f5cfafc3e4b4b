"""`train TASK` and `evaluate` from the command line, on small data."""

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from sightline.__main__ import main
from sightline.export import training_check
from sightline.model.architectures.factory import build_model
from sightline.model.checkpoint import load_metadata
from sightline.model.config import OWN_TASKS, ClassifierConfig, read_model_config
from sightline.model.data.records import TaskName
from sightline.model.data.samples import write_sample
from sightline.model.data.tokenizer_training import train_tokenizer
from sightline.model.evaluation import bleu
from sightline.model.training.options import read_train_config
from tests.model.pretrained_folders import TEMPLATE, check_here, write_decoder

SMALL = ("--epochs", "1", "--vocab-size", "300", "--threads", "1")
LABELLED = [{"text": f"word {index}", "label": "ab"[index % 2]} for index in range(20)]
HELD_OUT = [{"text": f"other {index}", "label": "ab"[index % 2]} for index in range(4)]


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def short_translations() -> Iterator[None]:
    """Limit the tokens of translations, because models with so little training never end one."""
    with patch.object(bleu, "MAX_NEW_TOKENS", 8):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with sample data of each task."""
    folder = tmp_path_factory.mktemp("data")
    for task in OWN_TASKS:
        write_sample(task, folder / task, 40)
    return folder


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a finished run of each task."""
    folder = tmp_path_factory.mktemp("runs")
    for task in OWN_TASKS:
        languages = ("--source", "en", "--target", "de-CH") if task == "translation" else ()
        assert main(["train", task, str(data / task), "--run", str(folder / task), *SMALL, *languages]) == 0
    return folder


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check third-party files in this process, which has imported PyTorch."""
    monkeypatch.setattr(training_check, "run_limited", check_here)


@pytest.mark.parametrize("task", OWN_TASKS)
def test_a_run_has_a_checkpoint_its_options_and_a_record_with_the_metrics_of_dev(task: TaskName, runs: Path) -> None:
    run = runs / task
    assert (run / "averaged" / "weights.safetensors").is_file()
    assert f'task = "{task}"' in (run / "options.toml").read_text(encoding="utf-8")
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    assert record["task"] == task
    assert set(record["data"]) == {"train.jsonl", "dev.jsonl", "test.jsonl"}
    settings = json.loads((run / "train.json").read_text(encoding="utf-8"))
    assert settings["epochs"] == 1 and settings.keys().isdisjoint({"source", "target", "vocab_size"})
    languages = {name: record[name] for name in ("source", "target") if name in record}
    assert languages == ({"source": "en", "target": "de-CH"} if task == "translation" else {})
    assert ("labels" in record, "has_dialogues" in record) == (
        task in ("classification", "tagging"),
        task == "language-model",
    )
    (row,) = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    metrics = record["metrics"]["dev"]
    assert {name: metric["value"] for name, metric in metrics.items()} == row["metrics"] != {}
    for name, metric in metrics.items():
        assert (metric["examples"], metric["weights"]) == (20, "epoch 1")
        assert metric["search"] == ("greedy" if name in ("BLEU", "chrF", "exact answers") else None)
        assert bool(metric["signature"]) == (task == "translation")
    if task == "translation":
        assert re.fullmatch(
            r"nrefs:1\|bs:1000\|seed:12345\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:.+",
            metrics["BLEU"]["signature"],
        )


@pytest.mark.parametrize("task", OWN_TASKS)
def test_the_record_gets_the_metrics_of_a_whole_evaluation_on_the_test_data_of_the_training(
    task: TaskName, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert main(["evaluate", str(runs / task), "--num-beams", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["task"], report["data"], report["split"]) == (task, "test.jsonl", "test")
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["evaluated on test.jsonl", "", printed[2]]
    assert printed[2].split() == ["metric", "value", "95", "%", "interval", "examples"]
    record = json.loads((runs / task / "record.json").read_text(encoding="utf-8"))
    metrics = record["metrics"]["test"]
    assert record["metrics"]["dev"]
    for (name, metric), line in zip(metrics.items(), printed[3:], strict=False):
        assert (metric["examples"], metric["weights"]) == (20, "averaged")
        low, high = metric["interval"] or (0, 0)
        assert line.startswith(name) and line.endswith(f"{low:.2f} to {high:.2f}        20" if high else " 20")
    if task == "translation":
        for name in ("BLEU", "chrF"):
            assert metrics[name]["search"] == "2 beams, length penalty 1" and metrics[name]["signature"]
    else:
        names = {"language-model": "perplexity", "encoder": "recall@1", "tagging": "micro F1"}
        assert metrics[names.get(task, "accuracy")]["signature"] is None
    assert report["metrics"] == metrics


def test_a_file_is_evaluated_as_a_whole(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.jsonl", {"text": "Where is my parcel?", "label": "delivery"})
    assert (
        main(["evaluate", str(runs / "classification"), str(path), "--predictions", str(tmp_path / "out.jsonl")]) == 0
    )
    assert capsys.readouterr().out.startswith("evaluated on mine.jsonl\n")
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines())
    assert row.keys() == {"text", "expected", "predicted", "probability"} and row["expected"] == "delivery"


def test_the_summary_and_the_reasons_are_printed_before_the_training(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "classification", str(data / "classification"), "--run", str(run), *SMALL]) == 0
    printed = capsys.readouterr().err
    positions = [
        printed.index(part)
        for part in (
            "examples: train 40, dev 20, test 20",
            "model size tiny, for 40",
            "training classification",
            "epoch 1",
        )
    ]
    assert positions == sorted(positions)
    assert f"export it: sightline export {run}" in printed
    license_ = ("--license", "CC0-1.0")
    assert main(["train", "classification", str(data / "classification"), "--run", str(run), *SMALL, *license_]) == 0
    assert "has already finished" in capsys.readouterr().err
    assert json.loads((run / "record.json").read_text(encoding="utf-8"))["license"] == "CC0-1.0"


def test_a_limit_of_minutes_shortens_the_warm_up_by_measured_updates(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ["train", "classification", str(data / "classification"), "--run", str(run), "--threads", "1"]
    assert main([*arguments, "--minutes", "0.0003", "--accumulate", "2"]) == 0
    printed = capsys.readouterr().err
    assert re.search(r"for about \d+ updates: .* do not fit into 0.0003 minutes\n\d+ updates of", printed)
    assert "before the end of the warm-up" not in printed
    before = read_train_config(run / "train.json")
    assert main([*arguments, "--minutes", "0.0006", "--accumulate", "2"]) == 0  # the schedule is kept
    assert "a measurement" not in capsys.readouterr().err
    assert read_train_config(run / "train.json") == before.model_copy(update={"minutes": 0.0006})


def test_notes_of_pairs_come_before_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [{"source": f"word {index}", "target": f"Wort {index}"} for index in range(20)]
    dev = [{"source": "word 3", "target": "anderes Wort"}, {"source": "new", "target": "neu"}]
    write(tmp_path / "train.jsonl", *pairs)
    write(tmp_path / "dev.jsonl", *dev)
    arguments = ["translation", str(tmp_path), "--run", str(tmp_path / "run"), *SMALL]
    assert main(["train", *arguments]) == 0
    printed = capsys.readouterr().err
    assert "note: train also has the sources of 1 more of 2 examples of dev, with other targets" in printed
    assert "note: the languages are not known" in printed and "--source en --target de\n" in printed


def test_a_tokenizer_is_trained_on_a_sample_of_many_different_words(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.model.data.learnt_texts.MAX_WORD_BYTES", 100)
    run, tokenizers, note = tmp_path / "run", list[str](), None
    for name in ("run", "again"):
        command = ["train", "encoder", str(data / "encoder"), "--run", str(tmp_path / name), *SMALL, "--seed", "7"]
        assert main(command) == 0
        note = re.search(r"trained on about 1/(\d+) of the texts, chosen with the seed 7", capsys.readouterr().err)
        tokenizers.append((tmp_path / name / "tokenizer.json").read_text(encoding="utf-8"))
    assert note is not None and tokenizers[0] == tokenizers[1]
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    assert record["learnt_share"] == 1 / int(note[1])
    assert main(["train", "encoder", str(data / "encoder"), "--run", str(run), "--epochs", "2"]) == 0
    assert json.loads((run / "record.json").read_text(encoding="utf-8"))["learnt_share"] == record["learnt_share"]


@pytest.mark.parametrize("names_data", [False, True])
def test_the_record_gets_the_metrics_of_a_named_split(
    data: Path, runs: Path, tmp_path: Path, names_data: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run, report = tmp_path / "data", tmp_path / "run", tmp_path / "report.json"
    shutil.copytree(data / "translation", folder)
    shutil.copytree(runs / "translation", run)
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    (run / "record.json").write_text(json.dumps(record | {"data_path": str(folder)}), encoding="utf-8")
    write(folder / "news.en", "A dog runs.", "A cat sleeps.")
    write(folder / "news.de-CH", "Ein Hund rennt.", "Eine Katze schläft.")
    arguments = ["evaluate", str(run), *([str(folder)] if names_data else []), "--split", "news", "--num-beams", "1"]
    assert main([*arguments, "--limit", "1"]) == 0
    assert "news" not in json.loads((run / "record.json").read_text(encoding="utf-8"))["metrics"]
    assert main([*arguments, "--json", str(report)]) == 0
    metrics = json.loads((run / "record.json").read_text(encoding="utf-8"))["metrics"]["news"]
    scores = json.loads(report.read_text(encoding="utf-8"))
    assert metrics == scores["metrics"]
    assert metrics["BLEU"].keys() == {"value", "weights", "examples", "search", "signature", "interval"}
    assert (metrics["BLEU"]["examples"], metrics["BLEU"]["search"]) == (2, "greedy")


def test_a_resumed_run_keeps_its_settings_and_may_be_longer(
    data: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "encoder", run)
    before = read_train_config(run / "train.json")
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    assert record["examples"] == {"train": 40, "dev": 20, "test": 20}
    (run / "record.json").write_text(json.dumps(record | {"command": "sightline train a b"}), encoding="utf-8")
    # The tokenizer and all settings that the first command chose are those of the folder.
    assert main(["train", "encoder", str(data / "encoder"), "--run", str(run), "--epochs", "2"]) == 0
    assert "note: --epochs is 2 instead of 1\n" in capsys.readouterr().err
    after = read_train_config(run / "train.json")
    assert after.epochs == 2
    commands = json.loads((run / "record.json").read_text(encoding="utf-8"))["command"].splitlines()
    assert len(commands) == 2 and commands[0] == "sightline train a b"  # the card of the model shows both
    assert main(["train", "encoder", str(data / "encoder"), "--run", str(run), "--epochs", "1"]) == 0
    assert "has already finished: 2 epochs done" in capsys.readouterr().err
    assert (after.batch_tokens, after.warmup_steps) == (before.batch_tokens, before.warmup_steps)
    for option in (("--seed", "5"), ("--size", "small"), ("--dropout", "0.5"), ("--vocab-size", "400")):
        assert main(["train", "encoder", str(data / "encoder"), "--run", str(run), *option]) == 2
        assert f"contains a run with other values of {option[0]}; choose another folder" in capsys.readouterr().err


def test_settings_that_depend_on_the_epochs_are_chosen_again_for_another_number(
    data: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, command = tmp_path / "run", ["train", "classification", str(data / "classification"), "--run"]
    shutil.copytree(runs / "classification", run)
    before = read_train_config(run / "train.json")
    assert (before.epochs, before.average_last, before.patience_epochs) == (1, 1, 5)
    assert main([*command, str(run), "--epochs", "12"]) == 0
    printed = capsys.readouterr().err
    flags = "--average-last, --evaluate-epochs, --patience-epochs"
    assert f"{flags}: chosen again, for 12 epochs instead of 1\n" in printed
    assert "note: --epochs is 12 instead of 1, --patience-epochs is 6 instead of 5, --average-last is 9" in printed
    after = read_train_config(run / "train.json")
    length: dict[str, Any] = {"epochs": 12, "average_last": 9, "patience_epochs": 6, "evaluate_epochs": 1}
    assert after == before.model_copy(update=length)  # the warm-up is part of the schedule
    epochs = load_metadata(run / "averaged" / "weights.safetensors")["epochs"]
    assert epochs == list(range(4, 13))
    # A number of epochs that the run has done, and the same number, change nothing.
    for number in ("5", "12"):
        assert main([*command, str(run), "--epochs", number]) == 0
        assert "chosen again" not in capsys.readouterr().err
        assert read_train_config(run / "train.json") == after
    # Given values stay those of the run until others are given.
    given = ("--average-last", "2", "--patience-epochs", "3", "--minutes", "9")
    assert main([*command, str(run), "--epochs", "13", *given]) == 0
    assert main([*command, str(run), "--epochs", "14", "--average-last", "3"]) == 0
    assert "chosen again" not in capsys.readouterr().err
    after = read_train_config(run / "train.json")
    assert (after.average_last, after.patience_epochs, after.evaluate_epochs) == (3, 3, 1)
    assert load_metadata(run / "averaged" / "weights.safetensors")["epochs"] == [12, 13, 14]


def test_the_evaluation_of_a_divided_file_leaves_out_the_records_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = write(tmp_path / "all.jsonl", *LABELLED), tmp_path / "run"
    assert main(["train", "classification", str(file), "--run", str(run), *SMALL, "--warmup-steps", "50"]) == 0
    assert "before the end of the warm-up of 50, and has learned little" in capsys.readouterr().err
    for arguments in (["evaluate", str(run)], ["evaluate", str(run), str(file)]):
        assert main([*arguments, "--json", str(tmp_path / "report.json")]) == 0
        report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert report["split"] == "dev" and report["metrics"]["accuracy"]["examples"] < len(LABELLED) / 2
    assert "test" not in json.loads((run / "record.json").read_text(encoding="utf-8"))["metrics"]
    write(file, *LABELLED, *HELD_OUT)
    assert main(["evaluate", str(run)]) == 2
    assert f"{file} has changed since the training" in capsys.readouterr().err
    other = write(tmp_path / "other.jsonl", *HELD_OUT)
    assert main(["evaluate", str(run), str(other)]) == 0
    assert capsys.readouterr().out.startswith("evaluated on other.jsonl\n")


@pytest.mark.usefixtures("no_child")
def test_a_run_is_fine_tuned(data: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, source = tmp_path / "run", runs / "classification"
    arguments = ["train", "classification", str(data / "classification"), "--run", str(run), "--from", str(source)]
    assert main([*arguments, "--epochs", "1", "--threads", "1"]) == 0
    assert "starts from the weights of" in capsys.readouterr().err
    assert read_train_config(run / "train.json").learning_rate == 3e-4


@pytest.mark.usefixtures("no_child")
def test_a_resumed_training_of_low_rank_updates_gives_the_same_weights(
    data: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_decoder(tmp_path / "from", template=TEMPLATE)
    texts = write(tmp_path / "texts.jsonl", *({"text": f"There are {number}."} for number in range(20)))
    command = ["train", "language-model", str(texts), "--threads", "1", "--warmup-steps", "2", "--lora", "4"]
    command += ["--average-last", "2", "--patience-epochs", "9", "--run"]
    assert main([*command, str(tmp_path / "new")]) == 2
    assert "--lora needs --from with a third-party checkpoint; add it, or omit --lora" in capsys.readouterr().err
    command[-1:] = ["--from", str(tmp_path / "from"), "--run"]
    for run, epochs in (("whole", "2"), ("broken", "1"), ("broken", "2")):
        assert main([*command, str(tmp_path / run), "--epochs", epochs]) == 0
        assert re.search(r"with ([\d,]+) parameters, of which [\d,]+ are trained", capsys.readouterr().err)
    whole, broken = (load_file(tmp_path / run / "epochs" / "0002.safetensors") for run in ("whole", "broken"))
    before = load_file(tmp_path / "from" / "model.safetensors")
    assert whole.keys() == broken.keys() == before.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert 0 < max((whole[name] - before[name]).abs().max().item() for name in whole) < 0.1


def test_a_file_of_options_is_overridden_and_stored(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "classification", "--print-config", "--dropout", "0.5", "--epochs", "9"]) == 0
    path = tmp_path / "options.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    run = tmp_path / "run"
    arguments = ["train", "classification", str(data / "classification"), "--run", str(run), "--config", str(path)]
    assert main([*arguments, *SMALL, "--precision", "bfloat16"]) == 0
    assert read_train_config(run / "train.json").precision == "bfloat16"
    model = read_model_config(run / "config.json")
    assert isinstance(model, ClassifierConfig) and model.dropout == 0.5
    text = (run / "options.toml").read_text(encoding="utf-8")
    assert "dropout = 0.5\n" in text and "epochs = 1\n" in text


@pytest.mark.parametrize(
    ("task", "formats"),
    [
        ("classification", ".jsonl, .json, .csv, .tsv, .xlsx, .ods"),
        ("language-model", ".jsonl, .json, .csv, .tsv, .xlsx, .ods, .txt"),
        (
            "translation",
            ".jsonl, .json, .csv, .tsv, .xlsx, .ods, .txt, .tmx, .xlf, .xliff, "
            "or two files such as corpus.en and corpus.de",
        ),
    ],
)
def test_the_help_names_the_formats_of_a_task(
    task: str, formats: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["train", task, "--help"])
    assert f"files of DATA: {formats}\n" in capsys.readouterr().out


def test_a_folder_without_a_checkpoint_cannot_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "it has no config.json; name the folder of a run, or of one of its checkpoints\n" in capsys.readouterr().err


Disk = namedtuple("Disk", "total used free")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([*LABELLED, '{"text": "x", '], "train.jsonl, line 21, column"),
        ([*LABELLED, {"words": "x", "label": "a"}], "train.jsonl, line 21"),
        ([*LABELLED, {"text": "x"}], "train.jsonl, line 21"),
        ([{"text": "x", "labels": ["a"]}], "; add --multi-label to train with several"),
        ([*LABELLED, {"text": "x", "label": 1}], "train.jsonl, line 21"),
        ([{"text": f"x {index}", "label": "a"} for index in range(5)], "needs at least two"),
        ([], "is empty"),
        (HELD_OUT, "have the same texts"),
        (["\udcff".join("ab")], "UTF-8"),
    ],
)
def test_wrong_data_are_errors_of_one_line_before_any_training(
    records: list[object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "data", tmp_path / "run"
    write(folder / "dev.jsonl", *HELD_OUT)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    content = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    (folder / "train.jsonl").write_bytes(content)
    assert main(["train", "classification", str(folder), "--run", str(run), *SMALL]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert message in printed.err
    assert not run.exists()


@pytest.mark.usefixtures("no_child")
def test_other_impossible_runs_are_errors_of_one_line(
    data: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, tokenizer = str(data / "language-model"), tmp_path / "tokenizer.json"
    train_tokenizer(["some words"], 270).save(str(tokenizer))
    new = str(tmp_path / "run")

    def refused(*words: str) -> str:
        assert main(["train", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert 'is for the task "encoder", not language-model' in refused(
        "language-model", chat, "--run", str(runs / "encoder")
    )
    assert "starts from an encoder that others trained" in refused("reranking", str(data / "encoder"), "--run", new)
    assert "lacks the special tokens <|im_start|>" in refused(
        "language-model", chat, "--run", new, "--tokenizer", str(tokenizer)
    )
    with pytest.raises(SystemExit, match="2"):
        main(["train", "language-model", chat, "--run", new, "--from", str(runs / "encoder")])
    assert "is a model of architecture encoder, which cannot be trained" in capsys.readouterr().err
    assert "cannot write to the folder" in refused("language-model", chat, "--run", str(tokenizer))
    assert "--vocab-size must be at least" in refused("language-model", chat, "--run", new, "--vocab-size", "100")
    assert "missing file or folder" in refused("language-model", str(tmp_path / "none"), "--run", new)
    assert "cannot write to the folder /proc/run" in refused("language-model", chat, "--run", "/proc/run")
    several = write(tmp_path / "several.tsv", "text\tlabels", "some words\ta|b")
    assert "; add --multi-label to train with several" in refused("classification", str(several), "--run", new)
    table = write(tmp_path / "table.csv", "text,lable", "some words,a")
    assert f"{table}, line 2: missing field 'label'" in refused("classification", str(table), "--run", new)
    # Options are checked before the data.
    none = ("language-model", str(tmp_path / "none"), "--run", new)
    assert "--lora needs --from" in refused(*none, "--lora", "4")
    assert "--size cannot be combined with --from" in refused(*none, "--from", "smollm2", "--size", "tiny")
    assert "missing file x; name a tokenizer.json" in refused(*none, "--tokenizer", "x")
    contradiction = ("--batch-tokens", "9", "--max-length-tokens", "10")
    assert "must be at most --batch-tokens (9), got 10" in refused(*none, *contradiction)
    assert main(["train", "encoder", str(data / "translation"), "--run", str(runs / "encoder")]) == 2
    assert "contains a run with other data; choose another folder" in capsys.readouterr().err
    assert main(["train", "language-model", chat, "--run", new, *SMALL, "--batch-tokens", "9"]) == 2
    assert "--max-length-tokens: must be at most --batch-tokens (9), got 192" in capsys.readouterr().err
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(0, 0, 1000))
    assert main(["train", "language-model", chat, "--run", new, *SMALL]) == 2
    shown = rf"the disk of {new} has 0 MiB free, but new checkpoints need \d+ MiB; remove files, or choose"
    assert re.search(shown, capsys.readouterr().err)


def test_the_checkpoints_of_a_resumed_run_count_as_space(
    data: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs / "encoder", tmp_path / "run")
    model = build_model(read_model_config(tmp_path / "run" / "config.json"))
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    free = 4 * weights  # for a new state with the moments of Adam, and the weights of an epoch
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(0, 0, free))
    command = ["train", "encoder", str(data / "encoder"), "--threads", "1", "--epochs", "2", "--run"]
    assert main([*command, str(tmp_path / "new"), "--vocab-size", "300"]) == 2
    assert "MiB free, but new checkpoints need" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "run")]) == 0
    free -= 1
    assert main([*command, str(tmp_path / "run")]) == 2


def test_a_table_with_other_columns_is_trained_evaluated_and_its_contradictions_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"Größe {index % 12};{'ab'[index // 12]};{index}" for index in range(24)] + ["neu;a;0", "alt;b;0"]
    table = tmp_path / "table.csv"
    table.write_bytes("\r\n".join(["Nachricht;Art;Nr", *rows, ""]).encode("cp1252"))
    run, options = tmp_path / "run", ("--text", "nachricht", "--label", "Art", "--encoding", "cp1252")
    assert main(["train", "classification", str(table), "--run", str(run), *SMALL, *options]) == 0
    shown = capsys.readouterr().err
    assert "table.csv: text is the column 'Nachricht'; label is the column 'Art'; ignored: 'Nr'\n" in shown
    assert "texts with different labels: 12; correct them, the first 12 are in contradictions.txt of the run\n" in shown
    lines = (run / "contradictions.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 12 and "'Größe 0': a (table.csv, line 2), b (table.csv, line 14)" in lines
    assert all(f"  {line}\n" in shown for line in lines[:10]) and lines[11] not in shown
    config = read_model_config(run / "config.json")
    assert isinstance(config, ClassifierConfig) and config.max_positions == 512  # the limit of the training
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    assert record["reading"] == {"text": "nachricht", "label": "Art", "encoding": "cp1252"}
    assert main(["evaluate", str(run)]) == 0
    other = write(tmp_path / "other.csv", "text,label", "Größe 3,a")
    assert main(["evaluate", str(run), str(other)]) == 2
    assert "no column 'nachricht', which --text names; there are 'text', 'label'" in capsys.readouterr().err
    options = ("--text", "text", "--label", "label", "--encoding", "utf-8")
    assert main(["evaluate", str(run), str(other), *options]) == 0


def test_a_translation_memory_is_trained_and_evaluated_in_the_direction_that_the_user_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = '<tu><tuv xml:lang="en-US"><seg>one {0}</seg></tuv><tuv xml:lang="de"><seg>eins {0}</seg></tuv></tu>\n'
    units = "".join(unit.format(number) for number in range(30))
    memory = write(tmp_path / "memory.tmx", f'<tmx version="1.4"><body>{units}</body></tmx>')
    command = ["train", "translation", str(memory), "--run", str(tmp_path / "run"), *SMALL]
    assert main(command) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "name the direction" in one)
    assert f"sightline train translation {memory} --run RUN --source de --target en-US" in line
    assert main([*command, "--source", "de"]) == 0
    assert "languages: de (source) to en-US (target)" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "record.json").read_text(encoding="utf-8"))["source"] == "de"
