"""Files that were made to crash a training, or to make it work without end, before it starts."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers
from transformers import LlamaForCausalLM

from sightline.__main__ import main as sightline
from sightline.base.machine import bounded_memory
from sightline.export import training_check
from sightline.export.training_check import main
from sightline.model.data.chat_template import CHAT_TEMPLATE
from sightline.model.data.records import TaskName
from sightline.model.data.samples import write_sample
from tests.export.hostile import Change
from tests.export.test_gguf import MODELS, write_gguf
from tests.export.test_hostile import HUGE, REPLACEMENTS, TOO_SHORT, WRONG_INDICES, write_rules
from tests.model.pretrained_folders import TEMPLATE, byte_tokenizer, check_here, write_decoder, write_encoder
from tests.support.tables import read_table

Check = Callable[..., str]
TASKS: dict[str, TaskName] = {"llama": "language-model", "bert": "encoder", "distilbert": "classification"}
SECONDS, MEMORY = 10, 300 << 20  # of a check in this process
DOUBLING = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    write_decoder(folder / "llama", template=TEMPLATE)
    for family in ("bert", "distilbert"):
        write_encoder(folder / family, family)
    return folder


@pytest.fixture
def copy_of(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: Path(shutil.copytree(originals / family, tmp_path / "checkpoint"))


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that checks files in this process and returns the error, or ""."""

    def check(path: Path, task: TaskName = "language-model") -> str:
        started = time.process_time()
        template = CHAT_TEMPLATE if task == "language-model" else None
        with bounded_memory(MEMORY), tempfile.TemporaryDirectory() as parts:
            status = main(path, *((parts, task, json.dumps(template)) if path.is_dir() else ()))
        assert time.process_time() - started < SECONDS
        error = capsys.readouterr().err
        assert (status, error[:7], error.count("\n")) == ((2, "error: ", 1) if error else (0, "", 0))
        return error

    return check


@pytest.mark.parametrize("family", TASKS)
def test_right_files_are_accepted(family: str, originals: Path, error_of: Check) -> None:
    assert error_of(originals / family, TASKS[family]) == ""
    assert error_of(originals / family / "tokenizer.json", TASKS[family]) == ""


# Configurations


@pytest.mark.parametrize(
    ("family", "key"),
    read_table(__file__),
)
def test_a_size_that_the_tensors_do_not_have_is_refused(
    family: str, key: str, copy_of: Callable[[str], Path], error_of: Check
) -> None:
    folder = copy_of(family)
    for value in (-1, 10**9, 10**18, int("9" * 400), "x", [1]):
        Change("config.json", (key,), value).apply(folder)
        assert "config.json" in error_of(folder, TASKS[family]), value


@pytest.mark.parametrize("kind", sorted(REPLACEMENTS.keys() - {"pipe"}))
def test_a_file_of_another_kind_is_ignored_or_refused(
    kind: str, originals: Path, copy_of: Callable[[str], Path], error_of: Check
) -> None:
    folder = copy_of("llama")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        REPLACEMENTS[kind](folder / name)
        error_of(folder)  # a traceback is a defect
        shutil.rmtree(folder)
        shutil.copytree(originals / "llama", folder)


# Tokenizers


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (DOUBLING, "tokenizer cannot be used: its normalizer can make a text 1.1e+12 times longer"),
        (normalizers.Replace(Regex("(a+)+b"), "c"), "the tokenizer fails for a text of 5001 characters"),
        (TOO_SHORT, "Cannot parse precompiled_charsmap"),
        (WRONG_INDICES, "cannot be used: index out of bounds"),
    ],
    ids=["doubling", "slow expression", "too short", "wrong indices"],
)
def test_a_tokenizer_whose_work_has_no_bound_is_refused(
    normalizer: Any, message: str, copy_of: Callable[[str], Path], error_of: Check
) -> None:
    folder = copy_of("llama")
    if isinstance(normalizer, bytes):
        write_rules(folder, normalizer)
    else:
        tokenizer = byte_tokenizer()
        tokenizer.normalizer = normalizer
        tokenizer.save(str(folder / "tokenizer.json"))
    assert message in error_of(folder)
    assert message in error_of(folder / "tokenizer.json", "classification")


def test_a_large_token_id_is_refused(copy_of: Callable[[str], Path], error_of: Check) -> None:
    folder = copy_of("bert")
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    token = next(iter(document["model"]["vocab"]))
    Change("tokenizer.json", ("model", "vocab", token), 10**9).apply(folder)
    assert "it has the token id 1000000000; ids must be less than 4194304" in error_of(folder, "encoder")


# Chat templates


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1000000 steps"),
        ("{{ 'a'.center(5000000000) }}", "it needs too much memory"),
        (" " * 200_000, "characters, and at most 131072 are supported"),
    ],
)
def test_the_work_of_a_chat_template_has_limits(
    start: str, message: str, copy_of: Callable[[str], Path], error_of: Check
) -> None:
    folder = copy_of("llama")
    (folder / "chat_template.jinja").write_text(start + TEMPLATE, encoding="utf-8")
    assert message in error_of(folder)


# The command


def refused(task: TaskName, options: Sequence[object], folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the error of a training, which has not begun."""
    write_sample(task, folder / "data", 20)
    with pytest.raises(SystemExit) as raised:
        sightline(["train", task, str(folder / "data"), "--run", str(folder / "run"), *map(str, options)])
    error = capfd.readouterr().err
    assert (raised.value.code, error[:7], error.count("\n")) == (2, "error: ", 1)
    assert not (folder / "run").exists()
    return error


def test_a_panic_of_a_library_is_one_line(
    copy_of: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("llama")
    write_rules(folder, HUGE)
    options = ["--tokenizer", folder / "tokenizer.json"]
    message = refused("classification", options, tmp_path, capfd)
    assert message.startswith(f"error: reading {folder}/tokenizer.json ended with the signal SIGABRT: a library failed")


def test_a_checkpoint_is_checked_in_a_process_of_its_own(
    copy_of: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("llama")
    Change("config.json", ("num_hidden_layers",), 10**9).apply(folder)
    message = f"error: {folder}: config.json: num_hidden_layers must be from 1 to 1000, got 1000000000\n"
    assert refused("language-model", ["--from", folder], tmp_path, capfd) == message


def test_a_tokenizer_that_fails_only_for_the_data_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data = tmp_path / "tokenizer.json", tmp_path / "data.csv"
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Replace(Regex("(ж+)+б"), "c")
    tokenizer.save(str(file))
    data.write_text("text,label\n" + "".join(f"{'ж' * 5000}{index},{'xy'[index % 2]}\n" for index in range(30)))
    words = ["train", "classification", data, "--run", tmp_path / "run", "--tokenizer", file]
    assert sightline(list(map(str, words))) == 2  # after the check
    error = capsys.readouterr().err
    assert (
        error.startswith("error: data.csv, line 4: the tokenizer fails for a text of the data: ")
        and error.count("\n") == 1
    )


def test_a_gguf_file_is_converted_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_check, "run_limited", check_here)
    file = write_gguf(tmp_path / "model.gguf", LlamaForCausalLM(MODELS["llama"]))
    data = tmp_path / "texts.txt"
    data.write_text("".join(f"There are {number} birds.\n" for number in range(20)), encoding="utf-8")
    words = ["train", "language-model", data, "--from", file, "--epochs", "1", "--threads", "1", "--run"]
    assert sightline([*map(str, words), str(tmp_path / "run")]) == 0
    assert f"starts from the weights of {file} (llama)\n" in capfd.readouterr().err
    assert (tmp_path / "run" / "averaged" / "model.safetensors").is_file()
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(SystemExit, match="2"):
        sightline([*map(str, words), str(tmp_path / "other")])
    assert f"error: {file} is not a supported GGUF file: its header is" in capfd.readouterr().err
    missing = tmp_path / "none.gguf"
    assert sightline([*map(str, words[:4]), str(missing), "--run", str(tmp_path / "other")]) == 2
    assert f"error: missing file {missing}; name a GGUF file" in capfd.readouterr().err
