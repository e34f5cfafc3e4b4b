"""`sightline serve MODEL ...`: what a word names, what is imported, and what is served."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from sightline.base.bundle_files import read_bundle, read_manifest, write_manifest
from sightline.base.errors import UsageError
from sightline.commands.serve import prepare, provide
from sightline.export import limits
from sightline.service.settings import make_settings
from tests.export.folders_of_others import write_bert
from tests.support.tables import read_table

SHIPPED = Path("bundles/sst2-sentiment").resolve()


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    return tmp_path / "bundles"


@dataclass(frozen=True)
class Served:
    """A checkpoint that `sightline serve` has imported and served."""

    checkpoint: Path
    bundle: Path
    lines: list[dict[str, Any]]  # of the log
    response: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served")
    checkpoint, bundles = write_bert(folder / "bert"), folder / "bundles"
    shutil.copytree(SHIPPED, bundles / "other")
    command = [sys.executable, "-m", "sightline", "serve", str(checkpoint), "--bundles", str(bundles), "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIGHTLINE_")}
    options = ("--drain-s", "0", "--workers", "1", "--threads", "1", "--max-rows", "2")
    with subprocess.Popen([*command, *options], env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines: list[dict[str, Any]] = []
        while not lines or lines[-1]["message"] != "serving":
            lines.append(json.loads(running.stdout.readline()))
        port = next(line["port"] for line in lines if line["message"] == "listening")
        url, headers = f"http://127.0.0.1:{port}/v1/encode", {"Content-Type": "application/json"}
        with urlopen(Request(url, b'{"inputs": "a b"}', headers), timeout=20) as response:
            received = json.load(response)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=20) == 0
    return Served(checkpoint, bundles / "bert", lines, received)


@pytest.fixture
def imported(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Commands of imports, which copy bundles instead."""
    commands: list[Sequence[str]] = []

    def copy(module: str, words: Sequence[str], *, temporary: Path) -> int:
        assert module == "sightline" and temporary.is_dir() and temporary.name.startswith(".")
        commands.append(words)
        shutil.copytree(served.bundle if words[0] == "export" else SHIPPED, words[-1])
        return 0

    monkeypatch.setattr(limits, "run_limited", copy)
    return commands


def test_a_folder_is_imported_and_served_alone(served: Served) -> None:
    assert served.lines[0]["message"] == f"importing {served.checkpoint} to {served.bundle}"
    assert served.lines[-1]["models"] == ["bert"]
    assert served.response["dimensions"] == 16
    assert {path.name for path in served.bundle.parent.iterdir()} == {"bert", "other"}
    assert read_bundle(served.bundle).verification is not None


def test_only_what_is_missing_is_imported(served: Served, bundles: Path, imported: list[Sequence[str]]) -> None:
    checkpoint = str(served.checkpoint)
    assert provide(["minilm", checkpoint, str(SHIPPED), "minilm"], bundles) == ("minilm", "bert", SHIPPED.name)
    assert imported == [
        ["models", "get", "minilm", "--out", str(bundles / "minilm")],
        ["export", checkpoint, "--out", str(bundles / "bert")],
    ]
    assert (bundles / SHIPPED.name).readlink() == SHIPPED
    imported.clear()
    assert provide(["minilm", checkpoint, str(SHIPPED)], bundles) == ("minilm", "bert", SHIPPED.name)
    assert provide(["bert", str(bundles / "minilm")], bundles) == ("bert", "minilm")
    renamed = read_manifest(bundles / "bert").model_copy(update={"name": "reader"})
    write_manifest(bundles / "bert", renamed)
    assert provide(["reader"], bundles) == ("bert",)
    assert imported == []
    assert {path.name for path in bundles.iterdir()} == {"minilm", "bert", SHIPPED.name}


@pytest.mark.usefixtures("imported")
def test_a_bundle_of_the_same_name_from_elsewhere_is_not_served_instead(
    served: Served, tmp_path: Path, bundles: Path
) -> None:
    provide([str(served.checkpoint)], bundles)
    for words in (["owner/bert"], [str(served.bundle)], ["owner/minilm", "minilm"], ["one/name", "two/name@main"]):
        with pytest.raises(UsageError, match=f"would replace {bundles}/.*; serve it as another one: sightline "):
            provide(words, bundles)
    manifest = read_manifest(bundles / "bert")
    assert manifest.origin is not None
    origin = manifest.origin.model_copy(update={"repository": "owner/bert"})
    write_manifest(bundles / "bert", manifest.model_copy(update={"origin": origin}))
    assert provide(["owner/bert@main"], bundles) == ("bert",)
    changed = write_bert(tmp_path / "bert", hidden_act="relu")
    with pytest.raises(
        UsageError, match=r"/bert, which is another bundle; .* --out .*/OTHER and sightline serve OTHER"
    ):
        provide([str(changed)], bundles)


@pytest.mark.parametrize(("word", "message"), read_table(__file__))
def test_a_word_that_names_no_model_is_an_error(word: str, message: str, bundles: Path) -> None:
    with pytest.raises(UsageError, match=message):
        provide([word], bundles)
    assert not bundles.exists()


def test_an_import_that_fails_ends_the_command_with_its_status(
    tmp_path: Path, bundles: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        prepare(make_settings({"bundles": str(bundles)}), {"models": [str(tmp_path / "empty")]})
    assert ended.value.code == 1
    assert capfd.readouterr().err.startswith(f"error: {tmp_path}/empty")
    assert list(bundles.iterdir()) == []


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_to_serve_names_three_ways_to_get_a_model(
    exists: bool, bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if exists:
        bundles.mkdir()
    with pytest.raises(SystemExit) as ended:
        prepare(make_settings({"bundles": str(bundles)}), {})
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    error, *ways = errors.splitlines()
    assert error.startswith("error: ") and str(bundles) in error
    assert [line.split()[:3] for line in ways] == [
        ["sightline", "serve", word] for word in ("minilm", "OWNER/NAME", "RUN")
    ]
