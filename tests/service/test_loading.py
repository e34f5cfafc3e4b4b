"""From a real bundle to a backend. These tests need what exports one."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from export.bundle import half_bundle
from service.bundle import MANIFEST, BundleError, read_manifest, record_files, write_manifest
from service.engine.observer import EngineObserver, NullObserver
from service.engine.request import DecodingParameters, Event, Generated, GenerateRequest
from service.loading import find_bundles, load_backend
from service.serving import Backend
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


def test_bundles_with_equal_tokenizers_share_one(folder: Path) -> None:
    manifest = read_manifest(folder / "toy")
    shutil.copytree(folder / "toy", folder / "other")
    write_manifest(folder / "other", manifest.model_copy(update={"name": "other"}))
    models = load_backend(Settings(bundles=folder, threads=1, max_rows=2), observer_of).models
    assert models["toy"].source_tokenizer is models["other"].source_tokenizer


def test_bundles_with_different_tokenizers_each_have_their_own(folder: Path) -> None:
    manifest = read_manifest(folder / "toy")
    shutil.copytree(folder / "toy", folder / "other")
    path = folder / "other" / manifest.source_tokenizer
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    files = manifest.files | record_files(folder / "other", [path.name])
    write_manifest(folder / "other", manifest.model_copy(update={"name": "other", "files": files}))
    models = load_backend(Settings(bundles=folder, threads=1, max_rows=2), observer_of).models
    assert models["toy"].source_tokenizer is not models["other"].source_tokenizer


def generate(backend: Backend, name: str) -> list[int]:
    results: list[Event] = []
    request = GenerateRequest("r", (11, 52, 90, 2), 1e9, DecodingParameters(max_new_tokens=8))
    backend.engines[name].submit(request, results.append)
    while backend.engines[name].has_work:
        backend.engines[name].step()
    (result,) = results
    assert isinstance(result, Generated)
    return [token.id for token in result.targets[0].tokens]


def test_the_service_never_looks_at_what_an_architecture_is_called(folder: Path) -> None:
    manifest = read_manifest(folder / "toy")
    shutil.copytree(folder / "toy", folder / "other")
    changes = {"name": "other", "architecture": secrets.token_hex()}
    write_manifest(folder / "other", manifest.model_copy(update=changes))
    backend = load_backend(Settings(bundles=folder, threads=1, max_rows=2), observer_of)
    assert backend.models["other"].manifest.architecture != manifest.architecture
    assert generate(backend, "other") == generate(backend, "toy")


def test_a_float16_bundle_is_served_on_the_cpu_too(bundle: Path, tmp_path: Path) -> None:
    half_bundle(bundle, tmp_path / "half", None)
    backend = load_backend(Settings(bundles=tmp_path, threads=1, max_rows=2), observer_of)
    assert (backend.models["half"].provider, backend.models["half"].manifest.dtype) == ("cpu", "float16")
    requests = [GenerateRequest(name, (11, 52, 90, 2), 1e9, DecodingParameters(max_new_tokens=4)) for name in "abc"]
    results: list[Event] = []
    for request in requests:
        backend.engines["half"].submit(request, results.append)
    while backend.engines["half"].has_work:
        backend.engines["half"].step()
    targets = [result.targets[0].tokens for result in results if isinstance(result, Generated)]
    assert len(targets) == 3 and targets[0] == targets[1] == targets[2]


def test_a_bundle_that_cuda_cannot_run_is_refused_where_cuda_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.loading.choose_provider", lambda _: "cuda")
    settings = Settings(bundles=folder, threads=1, max_rows=2)
    assert load_backend(settings, observer_of).models["toy"].provider == "cpu"
    with pytest.raises(BundleError, match="toy is float32; CUDA runs what `python -m export half` writes"):
        load_backend(settings.model_copy(update={"provider": "cuda"}), observer_of)


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
