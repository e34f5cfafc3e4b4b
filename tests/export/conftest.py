import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from export.check.sessions import Sessions, open_sessions
from model.architectures.transformer import Transformer
from model.checkpoint import load_checkpoint
from model.rounding import Reference, reference
from service.bundle import read_bundle


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> tuple[Transformer, Tokenizer]:
    model, tokenizer = load_checkpoint(checkpoint)
    assert isinstance(model, Transformer)
    return model, tokenizer


@pytest.fixture(scope="session")
def model(loaded: tuple[Transformer, Tokenizer]) -> Transformer:
    return loaded[0]


@pytest.fixture(scope="session")
def models(model: Transformer) -> Reference[Transformer]:
    return reference(model)


@pytest.fixture(scope="session")
def tokenizer(loaded: tuple[Transformer, Tokenizer]) -> Tokenizer:
    return loaded[1]


@pytest.fixture(scope="session")
def sessions(bundle: Path) -> Sessions:
    return open_sessions(bundle, read_bundle(bundle))


@pytest.fixture(scope="session")
def sources(tokenizer: Tokenizer, toy_sentences: list[str]) -> list[list[int]]:
    """Sources of different lengths."""
    return [encoding.ids for encoding in tokenizer.encode_batch(toy_sentences)]


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copied"))
