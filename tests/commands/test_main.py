"""The command line as a whole: help, errors, missing libraries, and commands of other packages."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sightline import __version__
from sightline.__main__ import COMMANDS, main
from sightline.base.extras import LIBRARIES, install_command
from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import RecurrentConfig
from sightline.model.data.tokenizer_training import read_tokenizer
from tests.support.tables import read_table


def run(*arguments: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Run `sightline` in a process of its own; `before` and `after` are code around it."""
    program = f"import sys; {before}\nfrom sightline.__main__ import main\ncode = main({list(arguments)})\n{after}"
    command = [sys.executable, "-c", f"{program}\nsys.exit(code)"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_version_is_that_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"sightline {__version__}\n")


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.help)}$", text, flags=re.MULTILINE)
    assert text.endswith("\nexample: sightline serve --bundles bundles\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_opens_with_a_sentence_and_ends_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    usage, description, *_, example = capsys.readouterr().out.strip().split("\n\n")
    assert usage.startswith(f"usage: sightline {name} ")
    assert re.fullmatch(r"[A-Z][a-z]+ .+\.", description)
    assert example.startswith(f"example: sightline {name} ")


@pytest.mark.parametrize("name", [*COMMANDS, "models get", "load compare"])
def test_the_example_of_the_help_is_a_command_that_the_parser_accepts(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    example = capsys.readouterr().out.rpartition("example: sightline ")[2]
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        parsed = parse(parser, *arguments)
        bundle = Path(getattr(parsed, "bundle", "bundles"))
        # No shipped bundle is float32; `sightline models get minilm` writes this one.
        assert bundle == Path("bundles/minilm") if name in ("quantize", "pack") else bundle.is_dir()
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        main(shlex.split(example))


class Parsed(Exception):  # noqa: N818 - not an error
    """The arguments were accepted."""


@pytest.mark.parametrize("arguments", [[], ["serv"], ["--nope"], *([name, "--nope", "x"] for name in COMMANDS)])
def test_a_wrong_command_or_option_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1
    name = " ".join(["sightline", *arguments[:1]]) if arguments and arguments[0] in COMMANDS else "sightline"
    assert errors.endswith(f"; see `{name} --help`\n")


@pytest.mark.parametrize(("arguments", "option"), read_table(__file__))
def test_an_unknown_option_names_the_most_similar_one(
    arguments: str, option: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    errors = capsys.readouterr().err
    assert f" (did you mean {option}?); see" in errors if option else "did you mean" not in errors


# Runs each command as if nothing of this project and of the library that is missing were imported.
RUN_WITHOUT = """
import json, sys
for module, *words in json.loads(sys.argv[1]):
    removed = [name for name in sys.modules if name.partition(".")[0] in ("sightline", module)]
    kept = {name: sys.modules.pop(name) for name in removed}
    sys.modules[module] = None
    from sightline.__main__ import main
    print(main(words))
    del sys.modules[module]
    sys.modules.update(kept)  # a library cannot be imported twice
"""


def test_a_library_that_is_not_installed_is_named_with_the_command_that_installs_it(
    bundle: Path, checkpoint: Path, tmp_path: Path
) -> None:
    recurrent = RecurrentConfig(read_tokenizer(checkpoint / "tokenizer.json").get_vocab_size())
    weights = RecurrentModel(recurrent).state_dict()
    save_checkpoint(tmp_path / "run", recurrent, weights, checkpoint / "tokenizer.json", {})
    cases = [
        ("translate x", "onnxruntime", "ONNX Runtime", "cpu"),
        ("draw x --out x.svg", "onnxruntime", "ONNX Runtime", "cpu"),
        ("verify x --checkpoint y", "onnxruntime", "ONNX Runtime", "cpu,train"),
        ("train classification x --run y", "torch", "PyTorch", "train"),
        (f"export {tmp_path}/run --out {tmp_path}/x", "torch", "PyTorch", "cpu,train"),
        ("quantize x --out y --bits 8 --unverified", "onnx", "ONNX", "cpu,import"),
        (f"quantize {bundle} --out x --bits 8 --data data", "sacrebleu", "sacreBLEU", "cpu,train"),
    ]
    given = json.dumps([[module, *command.split()] for command, module, *_ in cases])
    done = subprocess.run([sys.executable, "-c", RUN_WITHOUT, given], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == [
        f"error: sightline {command.split()[0]} needs {library}: run pip install '.[{extras}]' in {Path.cwd()}"
        for command, _, library, extras in cases
    ]
    assert (done.returncode, done.stdout) == (0, "2\n" * len(cases))


def test_an_installation_without_the_checkout_names_the_file_of_the_release(tmp_path: Path) -> None:
    command = install_command("cpu,import", tmp_path)
    assert command == f"run pip install './sightline_serving-{__version__}-py3-none-any.whl[cpu,import]'"


def test_the_export_of_a_trained_transformer_needs_no_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    # A module of this name precedes the installed one, also in the process that checks the bundle.
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text("raise ModuleNotFoundError('blocked', name='torch')\n")
    (tmp_path / "sentences.txt").write_text("A man sleeps.\n")
    words = ["export", checkpoint, "--out", tmp_path / "out", "--sentences", tmp_path / "sentences.txt"]
    done = subprocess.run(
        [sys.executable, "-m", "sightline", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "blocked")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["verification"]["sentences"] == 1


def test_quantize_needs_only_the_extras_that_it_names(bundle: Path, tmp_path: Path) -> None:
    missing = ("torch", "sacrebleu", "sacremoses", "safetensors")  # of the extra `train`
    texts = tmp_path / "texts"
    texts.write_text("A man sleeps.\nA dog runs.\n")
    command = ["quantize", str(bundle), "--bits", "8", "--layers", "per-tensor", "--calibration", str(texts)]
    options = ["--out", str(tmp_path / "a"), "--unverified"], ["--out", str(tmp_path / "b"), "--texts", str(texts)]
    before = f"sys.modules.update(dict.fromkeys({missing}))"
    done = run(*command, *options[0], before=before, after=f"code = code or main({[*command, *options[1], '--force']})")
    assert done.returncode == 0, done.stderr
    assert re.findall('^  "bits": (.+),$', done.stdout, flags=re.MULTILINE) == ["8", "8"]


HELPS = {
    **{
        command: ["sightline", *command.split()]
        for command in (*COMMANDS, "models get", "load compare", "train encoder", "train sample")
    },
    "service": ["service"],
}
# Runs each command with --help, and prints its exit code, output and errors.
RUN_HELPS = """
import contextlib, io, json, runpy, sys, traceback

missing, commands = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(missing))
done = {}
for command, (module, *words) in commands.items():
    sys.argv = ["x", *words, "--help"]
    sys.modules.pop(f"{module}.__main__", None)  # an earlier command may have imported it
    code, output, errors = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        except Exception:
            traceback.print_exc()
    done[command] = (code, output.getvalue(), errors.getvalue())
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int | None, str, str]]:
    """Exit code, output and errors of each command with `--help`, without libraries of extras."""
    command = [sys.executable, "-c", RUN_HELPS, json.dumps(list(LIBRARIES)), json.dumps(HELPS)]
    done: dict[str, tuple[int | None, str, str]] = json.loads(subprocess.check_output(command))
    return done


@pytest.mark.parametrize("command", HELPS)
def test_help_needs_no_library_of_an_extra(command: str, helps: dict[str, tuple[int | None, str, str]]) -> None:
    code, output, errors = helps[command]
    assert (code or 0, errors) == (0, "") and output.startswith("usage: ")


def test_a_module_that_no_extra_installs_is_a_bug_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise ModuleNotFoundError("No module named 'sightline.service.nothing'", name="sightline.service.nothing")

    monkeypatch.setattr("sightline.commands.models.run", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["models"])


def test_an_interrupted_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("sightline.commands.actions.run", interrupt)
    assert main(["export"]) == 130
    assert capsys.readouterr().err == "error: sightline export was interrupted\n"


TRAINING = ["torch", "onnx", "sightline.model", "sightline.export"]


@pytest.mark.parametrize(
    ("arguments", "unloaded"),
    [
        (["models", "--bundles", "bundles"], [*TRAINING, "onnxruntime", "uvicorn"]),
        (["translate", "/dev/null", "--bundle", "bundles/multi30k-en-de"], TRAINING),
    ],
)
def test_a_command_loads_no_library_that_it_does_not_need(arguments: list[str], unloaded: list[str]) -> None:
    after = f"print([name for name in {unloaded} if name in sys.modules], file=sys.stderr)"
    done = run(*arguments, after=after)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_train_export_verify_and_quantize_are_the_commands_of_their_packages(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n".join(toy_sentences[:2]) + "\n", encoding="utf-8")
    toy = str(tmp_path / "toy")
    assert main(["export", str(checkpoint), "--out", toy, "--sentences", str(sentences)]) == 0
    assert main(["verify", toy, "--checkpoint", str(checkpoint), "--sentences", str(sentences)]) == 0
    assert main(["quantize", toy, "--out", str(tmp_path / "int8"), "--bits", "8", "--unverified"]) == 0
    capsys.readouterr()
    assert main(["train", "classification", str(tmp_path / "nothing"), "--run", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1
    # A word that is a command is a folder here.
    assert main(["export", "verify", "--out", toy, "--sentences", str(sentences)]) == 2
    assert "verify" in capsys.readouterr().err


def test_the_distribution_has_the_script_and_every_package() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"sightline": "sightline.__main__:main"}
    packages = {
        ".".join(path.parent.parts if name == "sightline" else ("sightline", *path.parent.parts))
        for name in ("export", "loadtest", "model", "service", "sightline", "translation")
        for path in Path(name).rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == packages


@pytest.mark.parametrize("words", [["models"], ["translate", "{file}", "--bundle", "{bundle}"]])
def test_a_full_or_closed_standard_output_is_an_error_of_one_line(
    words: list[str], bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("A dog runs.\n")
    given = [word.format(file=tmp_path / "text", bundle=bundle) for word in words]
    command = [sys.executable, "-m", "sightline", *given]
    if words[0] == "models":
        command += ["--bundles", str(bundle.parent)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (1, 2) and done.stderr == "error: the output: No space left on device\n"
    closed = f"exec {shlex.join(command)} >&-"
    done = subprocess.run(["sh", "-c", closed], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: standard output is closed\n")


def test_an_argument_that_is_not_utf_8_is_an_error_of_one_line(bundle: Path) -> None:
    text = "caf\udce9"  # the byte E9
    command = [sys.executable, "-m", "sightline", "draw", text, "--bundle", str(bundle), "--out", "/nowhere/x.svg"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: an argument or a text is not UTF-8: ")
