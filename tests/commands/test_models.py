import json
import shutil
from pathlib import Path

import pytest

from lab.bench.server import serving
from sightline.__main__ import main
from sightline.base.bundle_files import read_manifest, write_manifest
from sightline.commands.models import task_of
from sightline.commands.serve import prepare
from sightline.service.settings import make_settings
from tests.support.dialogues import LINES


@pytest.fixture
def folder(bundle: Path, classifier_bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "toy")
    shutil.copytree(classifier_bundle, tmp_path / "judge")
    return tmp_path


def test_bundles_are_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--bundles", str(folder)]) == 0
    header, judge, toy = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "TASK", "SIZE", "MEMORY", "PRECISION", "LANGUAGES"]
    sizes = [line.split()[2:6] for line in (judge, toy)]
    assert judge.split() == ["toy-classifier", "classification", *sizes[0], "float32", "-"]
    assert toy.split() == ["toy", "translation", *sizes[1], "float32", "en", "to", "de"]
    assert [(size[1], size[3]) for size in sizes] == [("MB", "MB")] * 2
    assert [line.index("float32") for line in (judge, toy)] == [header.index("PRECISION")] * 2


def test_bundles_are_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--bundles", str(folder), "--json"]) == 0
    judge, toy = json.loads(capsys.readouterr().out)
    manifest = read_manifest(folder / "toy")
    assert toy == {
        "name": "toy",
        "task": "translation",
        "bytes": sum((folder / "toy" / name).stat().st_size for name in manifest.files),
        "memory_bytes": manifest.loaded_bytes,
        "parameters": manifest.parameters,
        "precision": "float32",
        "languages": ["en", "de"],
        "folder": str(folder / "toy"),
        "description": "random weights",
    }
    assert (judge["task"], judge["languages"]) == ("classification", None)


def test_a_bundle_that_cannot_be_read_is_an_error_beside_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "judge" / "manifest.json").write_text("{}")
    assert main(["models", "--bundles", str(folder)]) == 1
    output, errors = capsys.readouterr()
    assert [line.split()[0] for line in output.splitlines()] == ["NAME", "toy"]
    assert errors.startswith(f"error: {folder}/judge/manifest.json has schema_version None") and errors.count("\n") == 1


def test_a_folder_without_bundles_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--bundles", str(tmp_path / "no")]) == 2
    expected = f"error: there is no folder {tmp_path}/no with bundles; set SIGHTLINE_BUNDLES or --bundles\n"
    assert capsys.readouterr() == ("", expected)


def test_the_folder_may_come_from_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGHTLINE_BUNDLES", str(folder))
    assert main(["models", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    monkeypatch.setenv("SIGHTLINE_BUNDELS", str(folder))
    assert main(["models"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown setting: SIGHTLINE_BUNDELS")


def test_the_task_of_a_model_is_one_word(bundle: Path) -> None:
    translator = read_manifest(bundle)
    generator = translator.model_copy(update={"languages": None})
    encoder = generator.model_copy(update={"tasks": ("encode",)})
    models = (translator, generator, generator.model_copy(update={"chat": LINES}), encoder)
    assert [task_of(one) for one in models] == ["translation", "generation", "chat", "encoding"]


def test_a_written_manifest_is_what_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(folder / "toy")
    write_manifest(folder / "toy", manifest.model_copy(update={"name": "renamed"}))
    assert main(["models", "--bundles", str(folder), "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["toy-classifier", "renamed"]


def test_weights_that_were_rounded_to_float16_are_listed_as_such(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.stored_dtype == "float32"
    assert manifest.model_copy(update={"half_weights": True}).stored_dtype == "float16"
    assert manifest.model_copy(update={"half_weights": True, "dtype": "int8"}).stored_dtype == "int8"


def test_the_listed_memory_is_more_than_a_service_needs_to_load_the_shipped_bundles() -> None:
    manifests = [read_manifest(path.parent) for path in Path("bundles").glob("*/manifest.json")]
    with serving(Path("bundles"), workers=1) as server:
        assert 1e6 * server.memory_mb("VmHWM") <= 160_000_000 + sum(manifest.loaded_bytes for manifest in manifests)


def test_files_with_float16_weights_count_twice(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    half = manifest.model_copy(update={"half_weights": True})
    assert half.loaded_bytes - 20_000_000 == pytest.approx(2 * (manifest.loaded_bytes - 20_000_000), abs=1)


def test_a_chosen_default_precedes_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "toy", folder / "second")
    write_manifest(folder / "second", read_manifest(folder / "second").model_copy(update={"name": "second"}))
    bundles, file = ["--bundles", str(folder)], folder / "default_models.txt"

    def listed(*words: str) -> dict[str, str]:
        assert main(["models", "default", *words, *bundles]) == 0
        header, *lines = capsys.readouterr().out.splitlines()
        assert header.split(maxsplit=1) == ["TASK", "DEFAULT MODEL"]
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}

    several = "none; requests must name one of second, toy"
    assert (listed()["generate"], listed()["classify"]) == (several, "toy-classifier")
    assert listed("toy")["generate"] == "toy" and file.read_text() == "toy\n"
    assert listed("second", "toy-classifier")["generate"] == "second"
    assert file.read_text() == "second\ntoy-classifier\n"  # toy is the default of no task any more
    file.write_text("# preferred\n\ntoy # the first\n gone \n", encoding="utf-8-sig")
    assert listed("toy-classifier")["generate"] == "toy" and file.read_text() == "toy-classifier\ntoy\n"
    assert main(["models", "default", "tox", *bundles]) == 2
    assert capsys.readouterr().err == (
        f"error: {folder} has no model tox (did you mean toy?); it has toy-classifier, second, toy\n"
    )
    file.write_bytes(b"\xff")
    assert main(["models", "default", *bundles]) == 1
    assert f"{file} cannot be read: it is not UTF-8; write it again" in capsys.readouterr().err


def test_a_setting_precedes_the_defaults_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGHTLINE_BUNDLES", str(folder))
    (folder / "default_models.txt").write_text("toy\n")
    assert make_settings({}).default_model_names == ("toy",)
    for given, expected in (("toy-classifier", ("toy-classifier",)), ("", ())):
        monkeypatch.setenv("SIGHTLINE_DEFAULT_MODEL", given)
        assert make_settings({}).default_model_names == expected


def test_defaults_that_are_not_served_do_not_count(folder: Path) -> None:
    (folder / "default_models.txt").write_text("toy\ntoy-classifier\n")
    settings = make_settings({"bundles": folder})
    assert prepare(settings, {"models": ["judge"]}).default_model_names == ("toy-classifier",)
    assert prepare(settings, {}).default_model_names == ("toy", "toy-classifier")
