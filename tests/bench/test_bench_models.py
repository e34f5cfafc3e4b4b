from pathlib import Path

import pytest

from bench.models import RECIPES, Models, Subject
from bench.weights import read_model
from service.bundle import read_bundle


@pytest.fixture(scope="module")
def base(bundle: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Models(tmp_path_factory.mktemp("models"), bundle, toy_sentences).grown_base


def test_a_subject_has_a_bundle_of_each_data_type(base: Subject) -> None:
    assert base.bundles.keys() == {"float32", *RECIPES}
    assert read_bundle(base.bundles["float32"]).quantization is None
    for dtype, recipe in RECIPES.items():
        manifest = read_bundle(base.bundles[dtype])
        assert manifest.quantization is not None
        assert (manifest.dtype, manifest.quantization.schemes) == (dtype, recipe.schemes)
        assert list(base.bundles[dtype].parent.iterdir()) == [base.bundles[dtype]], (
            "each bundle must be alone in the folder that is served"
        )


def test_the_grown_base_has_the_papers_sizes_and_the_shipped_models_tokens(bundle: Path, base: Subject) -> None:
    config, small = read_model(base.bundles["float32"]).config, read_model(bundle).config
    assert (config.d_model, config.num_heads, config.d_ff) == (512, 8, 2048)
    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.vocab_size, config.max_positions) == (small.vocab_size, small.max_positions)
    assert read_bundle(base.bundles["float32"]).tokens == read_bundle(bundle).tokens
