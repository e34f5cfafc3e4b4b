"""The shipped model in PyTorch, in transformers and as a float32 bundle.

The shipped bundle may be quantised; equality is tested on what its weights stand for, served in
float32.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer

from lab.bench.marian import to_marian
from lab.bench.weights import read_model
from sightline.base.bundle_files import read_bundle, read_manifest
from sightline.export.options import BundleMetadata
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import save_checkpoint
from sightline.model.data.tokenizer_training import encode_lines, read_tokenizer
from sightline.model.rounding import Reference, reference
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.serving import client_of, write_bundles
from tests.equality.systems import random_models
from tests.support.training_runs import export_bundle

SHIPPED = Path("bundles/multi30k-en-de")


@pytest.fixture(scope="session")
def model() -> Transformer:
    return read_model(SHIPPED)


@pytest.fixture(scope="session")
def models(model: Transformer) -> Reference[Transformer]:
    """The model in float64 and its perturbed copies."""
    return reference(model, pairs=2)


@pytest.fixture(scope="session")
def marian(model: Transformer) -> Any:
    return to_marian(model)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return read_tokenizer(SHIPPED / read_manifest(SHIPPED).source_tokenizer)


@pytest.fixture(scope="session")
def sources(tokenizer: Tokenizer, sentences: list[str]) -> list[tuple[int, ...]]:
    """Sentences of loadtest/sentences.txt as token ids."""
    return [tuple(ids) for ids in encode_lines(tokenizer, sentences)]


@pytest.fixture(scope="session")
def float_bundle(model: Transformer, sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equality")
    tokenizer = SHIPPED / read_manifest(SHIPPED).source_tokenizer
    save_checkpoint(folder / "checkpoint", model.config, model.state_dict(), tokenizer, facts={})
    export_bundle(folder / "checkpoint", folder / "bundle", BundleMetadata("equality"), sentences[:2], check=False)
    return folder / "bundle"


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with random weights and bundle of each of the `SYSTEMS` of a module."""
    module, tokenizer = request.module, checkpoint / "tokenizer.json"
    models = random_models(module.SYSTEMS, tokenizer, module.NOISE)
    return write_bundles(tmp_path_factory.mktemp("systems"), models, tokenizer)


@pytest.fixture(scope="module")
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A service of the bundles that the fixture `folder` of a module has written, for its tests."""
    async with client_of(folder / "bundles") as client:
        yield client


@pytest.fixture(scope="session")
def runner(float_bundle: Path) -> OnnxRunner:
    return OnnxRunner(float_bundle, read_bundle(float_bundle), num_threads=1, max_rows=32)
