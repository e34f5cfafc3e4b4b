"""Exit statuses of every command: 0 done, 1 the work failed, 2 the arguments can never work."""

import shutil
from importlib import import_module
from pathlib import Path

import pytest

from sightline.__main__ import COMMANDS
from sightline.base.bundle_files import read_manifest, write_manifest
from sightline.model.data.records import TASK_NAMES

PROGRAMS = {"sightline": "sightline", "service": "sightline.service", "bench": "lab.bench", "zoo": "lab.zoo"}
# Every command with the status of its process. Names in braces are files of the fixture.
TABLE = [
    ("sightline", 2),
    ("sightline nothing", 2),
    ("sightline --version", 0),
    *((f"sightline {name} --help", 0) for name in [*COMMANDS, "models get", "models check", "load compare"]),
    *((f"sightline {name} --nope", 2) for name in [*COMMANDS, "models get", "models check", "load compare"]),
    ("sightline serve --port abc", 2),
    ("sightline translate {text} --bundle {bundle} --threads 1", 0),
    ("sightline translate {text} --bundle {bundle} --beams 99", 2),
    ("sightline translate {text} --bundle {bundle} --threads many", 2),
    ("sightline translate {tmp}/no --bundle {bundle}", 2),
    ("sightline translate {text} --bundle {tmp}/no", 2),
    ("sightline translate {text} --bundles {tmp}/no", 2),
    ("sightline translate {text} --bundle {classifier}", 2),
    ("sightline translate {text} --bundle {bundle} --out {tmp}/no/out", 2),
    ("sightline translate {text} --bundle {bundle} --out {text}", 2),
    ("sightline translate {text} --bundle {damaged}", 1),
    ("sightline translate {long} --bundle {bundle}", 1),
    ("sightline translate {binary} --bundle {bundle}", 1),
    ("sightline draw A --bundle {bundle} --out {tmp}/x.svg", 0),
    ("sightline draw A --bundle {bundle} --out {tmp}/no/x.svg", 2),
    ("sightline draw A --bundle {bundle} --out {tmp}/x.gif", 2),
    ("sightline draw A --bundle {bundle} --out {tmp}/x.svg --layer 99", 2),
    ("sightline draw A --bundle {tmp}/no --out {tmp}/x.svg", 2),
    ("sightline draw A --bundle {damaged} --out {tmp}/x.svg", 1),
    ("sightline models --bundles {folder}", 0),
    ("sightline models --bundles {tmp}/no", 2),
    ("sightline models --bundles {broken}", 1),
    ("sightline models get nothing-like-this", 2),
    ("sightline models check {configs}/google-bert--bert-base-uncased.json", 0),
    ("sightline models check {configs}/openai--whisper-small.json", 1),
    ("sightline models check {configs}/nothing.json", 2),
    ("sightline models get owner/name --source package", 2),
    ("sightline keys list --keys {keys}", 0),
    ("sightline keys add bob --keys {tmp}/new --role admin", 0),
    ("sightline keys add bob --keys {tmp}/new --requests-per-minute 60 --concurrent-sequences 4", 0),
    ("sightline keys remove alice --keys {keys}", 0),
    ("sightline keys add alice --keys {keys}", 1),
    ("sightline keys add no/slash --keys {tmp}/new", 1),
    ("sightline keys add bob --keys {tmp}/no/new", 1),
    ("sightline keys add bob --keys {damaged}/config.json", 1),
    ("sightline keys remove nobody --keys {keys}", 1),
    ("sightline keys list --keys {tmp}/no", 1),
    ("sightline keys list --keys {text}", 1),
    ("sightline keys list alice --keys {keys}", 2),
    ("sightline keys add --keys {keys}", 2),
    ("sightline keys list", 2),
    ("sightline keys add bob --keys {tmp}/new --tokens-per-minute 0", 2),
    ("sightline keys remove alice --keys {keys} --tokens-per-minute 1", 2),
    ("sightline load --duration long", 2),
    ("sightline load --prompts {tmp}/no", 2),
    ("sightline load --url http://127.0.0.1:9 --prompts {text} --requests 1 --warm-up 0s --rate 9 --max-lag 0s", 4),
    ("sightline load compare {tmp}/no {tmp}/no", 2),
    ("sightline load compare {damaged}/config.json {damaged}/config.json", 1),
    ("sightline load --url http://127.0.0.1:9 --prompts {text} --requests 1 --warm-up 0s", 1),
    ("sightline serve --keys {tmp}/no", 2),
    ("sightline serve --quota-storage memcached://localhost", 2),
    ("sightline serve --admin-address 9000", 2),
    *((f"sightline train {task} --help", 0) for task in TASK_NAMES),
    *((f"sightline train {task} --nope", 2) for task in TASK_NAMES),
    *((f"sightline train {task} --print-config", 0) for task in TASK_NAMES),
    ("sightline train translation", 2),
    ("sightline train translation {tmp}/no --run {tmp}/run", 2),
    ("sightline train translation {tmp} --run {tmp}/run --dropout 1", 2),
    ("sightline train translation {tmp} --run {tmp}/run --source e!", 2),
    ("sightline train translation {tmp} --run {tmp}/run --config {text}", 2),
    ("sightline train sample classification {tmp}/sample --examples 10", 0),
    ("sightline train sample classification {tmp} --examples 10", 2),
    ("sightline train sample translation {tmp}/sample --examples 0", 2),
    ("sightline evaluate {tmp}/no", 2),
    ("sightline evaluate {checkpoint}", 2),
    ("sightline export {tmp}/no --out {tmp}/out", 2),
    ("sightline export {damaged} --out {tmp}/out", 1),
    ("sightline quantize {bundle} --out {tmp}/int8 --bits 8 --unverified", 0),
    ("sightline quantize {bundle} --out {tmp}/int8 --bits 8 --unverified --block-size 7", 2),
    ("sightline quantize {tmp}/no --out {tmp}/int8 --bits 8 --unverified", 2),
    ("sightline quantize {damaged} --out {tmp}/int8 --bits 8 --unverified", 1),
    ("sightline verify {bundle} --checkpoint {tmp}/no", 2),
    ("sightline verify {bundle} --checkpoint {checkpoint} --sentences {text} --tolerance 1e-30", 1),
    ("sightline export {checkpoint} --out {tmp}/out --name no/slash", 2),
    ("sightline export {checkpoint} --out {tmp}/out --languages x1 2", 2),
    ("sightline export {checkpoint} --out {tmp}/out --sentences {tmp}/no", 2),
    ("sightline export {checkpoint} --out {checkpoint}", 2),
    ("sightline verify {tmp}/no --checkpoint {checkpoint}", 2),
    ("sightline align {tmp}/no", 2),
    ("sightline align {bundle} --sentences {long}", 1),
    ("sightline quantize {tmp}/no --out {tmp}/half --bits 16 --unverified", 2),
    ("sightline pack {tmp}/no --out {tmp}/small --unverified", 2),
    ("sightline evaluate {tmp}/no {tmp}", 2),
    ("sightline evaluate {checkpoint} {tmp}", 2),
    ("sightline evaluate {damaged_checkpoint} {tmp}", 1),
    ("service --help", 0),
    ("service --nope", 2),
    ("service --port abc", 2),
    ("zoo --help", 0),
    ("zoo train {tmp} --runs {tmp}/runs --seeds 0", 2),
    ("zoo export {tmp}/no --out {tmp}/out", 2),
    ("bench --help", 0),
    ("bench nothing", 2),
    ("bench library --bundle {tmp}/no", 2),
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
