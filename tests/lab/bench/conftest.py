import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.bench import models
from lab.bench.models import Models, Subject
from lab.bench.options import Options
from lab.bench.peers import Peer
from sightline.export import pipeline
from sightline.model.config import TransformerConfig
from tests.support.training_runs import omit_check

GROWN_SIZES = {"d_model": 64, "num_heads": 4, "d_ff": 128, "encoder_layers": 3, "decoder_layers": 3}


@pytest.fixture(scope="module", autouse=True)
def unverified() -> Iterator[None]:
    """Do not verify the models that are exported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "check", omit_check)
        yield


@pytest.fixture(scope="session")
def small_models(bundle: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Models of the toy bundle, and small ones in place of larger ones."""
    with pytest.MonkeyPatch.context() as patch:
        small = TransformerConfig(640, d_model=32, num_heads=4, d_ff=64, encoder_layers=2, decoder_layers=1)
        patch.setattr(models, "MARIAN", small)
        patch.setattr(models, "GROWN_SIZES", GROWN_SIZES)
        yield Models(tmp_path_factory.mktemp("models"), bundle, toy_sentences)


@pytest.fixture(scope="session")
def marian(small_models: Models) -> Subject:
    return small_models.marian


@pytest.fixture(scope="session")
def short(small_models: Models, bundle: Path, toy_sentences: list[str]) -> Options:
    """Options of a run that is as short as possible."""
    return Options(
        small_models, bundle.parent, toy_sentences, rounds=1, max_clients=1, seconds=0.2, requests=20, minutes=0.01,
        threads=1, is_quick=True,
    )  # fmt: skip


@pytest.fixture
def this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the environment of the tests instead of those of the peers."""
    monkeypatch.setattr(Peer, "python", lambda peer: Path(sys.executable))
