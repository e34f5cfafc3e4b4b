"""From a real bundle to a backend. These tests need what exports one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from service.bundle import MANIFEST, BundleError, read_manifest, write_manifest
from service.engine.observer import EngineObserver, NullObserver
from service.loading import find_bundles, load_backend
from service.settings import Settings


@pytest.fixture
def folder(bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "toy")
    return tmp_path


def observer_of(model: str) -> EngineObserver:
    return NullObserver()


def load(folder: Path) -> object:
    return load_backend(Settings(bundles=folder, threads=1, max_rows=2), observer_of)


def test_every_bundle_of_the_folder_is_served_by_its_own_name(folder: Path) -> None:
    (folder / "README.md").write_text("not a bundle")
    (folder / "empty").mkdir()
    backend = load_backend(Settings(bundles=folder, threads=1, max_rows=2), observer_of)
    assert list(backend.models) == list(backend.engines) == ["toy"]
    model = backend.models["toy"]
    assert model.provider == "cpu"
    assert model.source_tokenizer is model.target_tokenizer


def remove_manifest(folder: Path) -> None:
    (folder / "toy" / MANIFEST).unlink()


def truncate_weights(folder: Path) -> None:
    manifest = read_manifest(folder / "toy")
    path = folder / "toy" / max(manifest.files, key=lambda name: manifest.files[name].bytes)
    path.write_bytes(path.read_bytes()[:-1])


def add_a_twin(folder: Path) -> None:
    shutil.copytree(folder / "toy", folder / "twin")


def shrink_vocabulary(folder: Path) -> None:
    manifest = read_manifest(folder / "toy")
    limits = manifest.limits.model_copy(update={"vocabulary": 10})
    write_manifest(folder / "toy", manifest.model_copy(update={"limits": limits}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_manifest, "no folder in"),
        (truncate_weights, "SHA-256"),
        (add_a_twin, "two bundles in .* are named toy"),
        (shrink_vocabulary, "tokens, the model knows 10"),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(BundleError, match=message):
        load(folder)


def test_a_default_model_that_is_not_there_is_refused_before_anything_is_loaded(folder: Path) -> None:
    truncate_weights(folder)
    with pytest.raises(BundleError, match="the default model other is not in"):
        find_bundles(folder, "other")
