from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench import models
from lab.bench.models import RECIPES, Models, Subject
from lab.bench.weights import read_model
from sightline.base.bundle_files import read_bundle


def test_a_subject_has_a_bundle_of_each_data_type(marian: Subject) -> None:
    assert read_bundle(marian.bundle("float32")).quantization is None
    for dtype, recipe in RECIPES.items():
        manifest = read_bundle(marian.bundle(dtype))
        assert manifest.quantization is not None
        assert (manifest.dtype, manifest.quantization.schemes) == (dtype, recipe.schemes)
        assert list(marian.served(dtype).iterdir()) == [marian.bundle(dtype)], (
            "each bundle must be alone in the folder that is served"
        )


def test_the_grown_model_has_its_sizes_and_the_shipped_models_tokens(bundle: Path, small_models: Models) -> None:
    grown = small_models.grown.bundle("float32")
    assert read_model(grown).config == replace(read_model(bundle).config, **models.GROWN_SIZES)
    assert read_bundle(grown).tokens == read_bundle(bundle).tokens


def test_a_model_is_created_once_and_an_interrupted_one_again(
    bundle: Path, toy_sentences: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Models(tmp_path, bundle, toy_sentences)
    with monkeypatch.context() as patch:
        patch.setattr(models, "write_ctranslate2_model", lambda *_: pytest.fail("interrupted"))
        with pytest.raises(pytest.fail.Exception):
            _ = first.shipped
    assert not list(tmp_path.glob("*/shipped"))
    written = first.shipped.path("ctranslate2") / "model.bin"
    time = written.stat().st_mtime_ns
    assert Models(tmp_path, bundle, toy_sentences).shipped.path("ctranslate2").joinpath("model.bin") == written
    assert written.stat().st_mtime_ns == time
