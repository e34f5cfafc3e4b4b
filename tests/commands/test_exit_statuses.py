"""Exit statuses of every command: 0 done, 1 the work failed, 2 the arguments can never work."""

import shutil
from importlib import import_module
from pathlib import Path

import pytest

from sightline.__main__ import COMMANDS
from sightline.base.bundle_files import read_manifest, write_manifest
from sightline.model.data.records import TASK_NAMES
from tests.support.tables import read_table

PROGRAMS = {"sightline": "sightline", "service": "sightline.service", "bench": "lab.bench", "zoo": "lab.zoo"}
HELP = [f"sightline {name}" for name in ("models get", "models check", "load compare")]  # of others: test_main.py
TRAIN = [f"sightline train {task}" for task in TASK_NAMES]
# Every command with the status of its process.
TABLE: list[tuple[str, int]] = [
    *read_table(__file__),
    *((f"{command} {option}", status) for command in HELP + TRAIN for option, status in (("--help", 0), ("--nope", 2))),
    *((f"{command} --print-config", 0) for command in TRAIN),
]


@pytest.fixture
def names(bundle: Path, classifier_bundle: Path, checkpoint: Path, tmp_path: Path) -> dict[str, Path]:
    """Files and folders that the commands of the table name."""
    (tmp_path / "text").write_text("A man sleeps.\n")
    (tmp_path / "long").write_text("x " * 1000 + "\n")
    (tmp_path / "binary").write_bytes(b"\xff\n")
    for folder in ("damaged", "broken/one", "damaged_checkpoint"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "damaged/config.json").write_text('{"keys": [{"label": "x"}]}')
    shutil.copy("tests/data/keys.json", tmp_path / "keys")
    (tmp_path / "broken/one/manifest.json").write_text("{}")
    write_manifest(tmp_path / "damaged", read_manifest(bundle))  # its files are missing
    for name in ("config.json", "weights.safetensors", "tokenizer.json"):
        (tmp_path / "damaged_checkpoint" / name).write_text("{}")
    return {
        "tmp": tmp_path,
        "configs": Path("tests/data/configs"),
        **{
            name: tmp_path / name
            for name in ("text", "long", "binary", "keys", "damaged", "broken", "damaged_checkpoint")
        },
        "bundle": bundle,
        "classifier": classifier_bundle,
        "folder": bundle.parent,
        "checkpoint": checkpoint,
    }


@pytest.mark.parametrize(("command", "expected"), TABLE, ids=[command for command, _ in TABLE])
def test_exit_status(
    command: str,
    expected: int,
    names: dict[str, Path],
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    program, *words = [word.format(**names) for word in command.split()]
    try:
        status = import_module(f"{PROGRAMS[program]}.__main__").main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    errors = capfd.readouterr().err
    assert status == expected, errors
    if expected:
        assert errors.count("error: ") == 1


def test_the_table_has_every_command() -> None:
    written = {" ".join(command.split()[:2]) for command, _ in TABLE}
    assert {f"sightline {name}" for name in COMMANDS} <= written
