"""Export of the systems."""

import re
import shutil
from pathlib import Path

import pytest

from lab.zoo import export
from lab.zoo.__main__ import main
from lab.zoo.export import metadata_of
from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.base.bundle import Languages
from sightline.base.bundle_files import read_manifest
from sightline.export.describe import PLAIN_DIALOGUES
from sightline.export.import_errors import VerificationError
from sightline.export.pipeline import Export, Exported, export_checkpoint
from tests.export.conftest import few_sentences as few_sentences
from tests.export.test_export_main import sentences_path as sentences_path
from tests.export.test_export_main import short_reader as short_reader

pytestmark = pytest.mark.usefixtures("few_sentences")


def test_zoo_exports_the_first_run_of_each_system_that_is_finished(
    short_reader: Path, tmp_path: Path, sentences_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "bundles"
    for run in ("bahdanau-1", "bahdanau-2", "chat-gatt-1", "pre-norm-1", "sentiment-1"):
        shutil.copytree(short_reader, runs / run / "averaged")
        if run != "sentiment-1":
            (runs / run / "scores.json").write_text("{}", encoding="utf-8")
    assert main(["export", str(runs), "--out", str(out), "--sentences", str(sentences_path), "--half-weights"]) == 0
    manifests = [read_manifest(folder) for folder in sorted(out.iterdir())]
    assert [manifest.name for manifest in manifests] == [
        "multi30k-en-de-bahdanau",
        "multi30k-en-de-pre-norm",
        "smalltalk-chat-gatt",
    ]
    languages = Languages(sources=("en",), targets=("de",))
    assert [(one.languages, one.chat) for one in manifests] == [
        (languages, None),
        (languages, None),
        (None, PLAIN_DIALOGUES),
    ]
    assert "Bahdanau et al. 2015" in manifests[0].description
    assert all(manifest.half_weights for manifest in manifests)
    assert capsys.readouterr().out.startswith(f"{out / 'multi30k-en-de-bahdanau'}: ")
    arguments = ["export", str(runs), "--out", str(tmp_path / "one"), "--sentences", str(sentences_path)]
    assert main([*arguments, "--systems", "pre-norm"]) == 0
    assert [folder.name for folder in (tmp_path / "one").iterdir()] == ["multi30k-en-de-pre-norm"]
    assert main([*arguments, "--systems", "pre-norm", "--tolerance", "0"]) == 1
    assert re.search(r"error: pre-norm: \S+ and its checkpoint differ: ", capsys.readouterr().err)


def test_the_description_of_a_shipped_bundle_tells_what_its_model_knows() -> None:
    systems = {bundle_name(name): system for name, system in SYSTEMS.items()}
    systems["multi30k-en-de"] = systems["multi30k-en-de-transformer"]
    for folder in (path.parent for root in ("bundles", "lab/bundles") for path in Path(root).glob("*/manifest.json")):
        assert read_manifest(folder).description.endswith(f". {systems[folder.name].corpus.limits}"), folder


def test_a_rejected_system_does_not_prevent_the_export_of_others(
    short_reader: Path,
    tmp_path: Path,
    sentences_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "bundles"
    for name in ("bahdanau", "linformer", "pre-norm"):
        shutil.copytree(short_reader, runs / f"{name}-1" / "averaged")
        (runs / f"{name}-1" / "scores.json").write_text("{}", encoding="utf-8")

    def reject_two(described: Export) -> Exported:
        if described.metadata.name != "multi30k-en-de-linformer":
            raise VerificationError("too far off")
        return export_checkpoint(described)

    monkeypatch.setattr(export, "export_checkpoint", reject_two)
    assert main(["export", str(runs), "--out", str(out), "--sentences", str(sentences_path)]) == 1
    assert "error: bahdanau: too far off; pre-norm: too far off" in capsys.readouterr().err
    assert [folder.name for folder in out.iterdir()] == ["multi30k-en-de-linformer"]


def test_a_zoo_without_a_finished_run_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "has no finished run (NAME-1/scores.json)" in capsys.readouterr().err


def test_only_systems_for_longer_texts_are_trained_on_texts() -> None:
    units = [metadata_of(name).training_unit for name in ("joined-bahdanau", "small-general")]
    assert units == ["text", None]  # None for that of the task, sentences
