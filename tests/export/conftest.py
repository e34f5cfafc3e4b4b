import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sightline.base.bundle_files import read_bundle
from sightline.export import pipeline
from sightline.export.check import alignment, coverage
from sightline.export.check.sessions import Sessions, open_sessions
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model
from sightline.model.rounding import Reference, reference
from tests.support.training_runs import omit_check


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> tuple[Transformer, Tokenizer]:
    model, tokenizer = load_model(checkpoint)
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


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit the verification, which takes seconds."""
    monkeypatch.setattr(pipeline, "check", omit_check)


@pytest.fixture
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the heads that align words by few sentences, which takes a tenth of the time."""
    monkeypatch.setattr(alignment, "MAX_SENTENCES", 2)
    monkeypatch.setattr(coverage, "MAX_SENTENCES", 2)
