"""Imports of Firefox folders to bundles, and each error that a user can cause."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sightline.base.bundle import Manifest, Origin
from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import Sessions, onnx_steps, open_sessions
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.firefox.marian_binary import read_marian
from tests.export.firefox.models import VOCABULARY, random_tensors, write_folder, write_vocabulary
from tests.export.firefox.reference import END_ID, FirefoxReference
from tests.support.reference_decoding import LogitsProcessors, greedy
from tests.support.tables import read_table

TENSORS = random_tensors()
METADATA = BundleMetadata("imported", "", "MPL-2.0")
MODEL, SHORTLIST = "model.ende.intgemm8.bin", "lex.50.50.ende.s2t.bin"
TEXTS = ["a b", "c", "d e f a", "g h i j k l", "m é"]
NEW_TOKENS = 8


@pytest.fixture(params=[False, True], ids=["one vocabulary", "two vocabularies"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "ende", random_tensors(separate=request.param, seed=4))


def import_firefox(folder: Path, bundle: Path, options: ExportOptions = ExportOptions()) -> Manifest:  # noqa: B008
    return export_checkpoint(Export(folder, bundle, METADATA, options, "firefox")).manifest


@pytest.mark.usefixtures("few_sentences")
def test_a_folder_becomes_a_verified_bundle(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    (folder / "metadata.json").write_text(
        json.dumps({"architecture": "tiny", "sourceLanguage": "en", "targetLanguage": "de", "version": "1.0"})
    )
    (folder / SHORTLIST).touch()
    manifest = import_firefox(folder, tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle") == manifest
    assert manifest.languages is not None and manifest.verification is not None
    assert (manifest.languages.sources, manifest.languages.targets) == (("en",), ("de",))
    assert (manifest.architecture, manifest.training_unit) == ("firefox-tiny", "sentence")
    assert manifest.description == "Firefox translation model: en to de, tiny, version 1.0"
    read = {path.name for path in folder.iterdir()}
    assert isinstance(manifest.origin, Origin) and manifest.origin.files.keys() == read


@pytest.mark.usefixtures("unverified")
def test_a_description_of_the_user_replaces_that_of_the_metadata(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    (folder / "metadata.json").write_text('{"version": "1.0"}')
    metadata = BundleMetadata("imported", "mine")
    manifest = export_checkpoint(
        Export(folder, tmp_path / "bundle", metadata, ExportOptions(max_tokens=7), kind="firefox")
    ).manifest
    assert manifest.description == "mine" and manifest.limits.max_source_tokens == 7
    assert manifest.origin is not None and manifest.origin.kind == "firefox"


def translations(sessions: Sessions, sources: list[list[int]]) -> list[list[int]]:
    """Return greedy translations without the end token."""
    manifest = sessions.manifest
    processors = LogitsProcessors(suppress_tokens=manifest.generation.suppress_tokens)
    found = []
    for source in sources:
        steps = onnx_steps(sessions, source)
        ids = greedy(steps, manifest.tokens.start_ids[0], END_ID, NEW_TOKENS, processors=processors).ids
        found.append([id_ for id_ in ids if id_ != END_ID])
    return found


@pytest.mark.usefixtures("few_sentences")
def test_translations_of_a_verified_bundle_equal_those_of_the_reference(folder: Path, tmp_path: Path) -> None:
    manifest = import_firefox(folder, tmp_path / "bundle")
    assert manifest == read_bundle(tmp_path / "bundle") and manifest.verification is not None
    sessions = open_sessions(tmp_path / "bundle", manifest)
    tokenizer = Tokenizer.from_file(str(tmp_path / "bundle" / manifest.source_tokenizer))
    sources = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
    marian = read_marian(folder / MODEL)
    reference = FirefoxReference(marian)
    allowed = [id_ for id_ in range(VOCABULARY) if id_ != 1]
    expected = [reference.translate(source, NEW_TOKENS + 1, allowed).ids for source in sources]
    assert translations(sessions, sources) == expected


# Errors


def check_error(folder: Path, tmp_path: Path, message: str, options: ExportOptions = ExportOptions()) -> None:  # noqa: B008
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        import_firefox(folder, tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    read_table(__file__),
)
def test_options_that_are_not_supported(tmp_path: Path, options: dict[str, str], message: str) -> None:
    check_error(write_folder(tmp_path / "ende", TENSORS, options), tmp_path, message)


@pytest.mark.parametrize("key", ["type", "dec-cell", "dim-emb", "enc-depth", "dim-vocabs", "transformer-dim-ffn"])
def test_options_that_are_missing(tmp_path: Path, key: str) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS, {key: None})
    check_error(folder, tmp_path, f"{MODEL}: special:model.yml has no key '{key}', which its architecture needs")


@pytest.mark.parametrize("name", ["encoder_l1_self_Wq", "decoder_l1_ffn_W2", "encoder_l1_ffn_b1", "decoder_l1_rnn_bf"])
def test_a_tensor_of_another_shape(tmp_path: Path, name: str) -> None:
    rows, columns = TENSORS[name].shape
    folder = write_folder(tmp_path / "ende", {**TENSORS, name: TENSORS[name][:, :-1]})
    message = (
        f"the tensor '{name}' has the shape [{rows}, {columns - 1}], but special:model.yml of {folder}/{MODEL} implies "
        f"[{rows}, {columns}]; its configuration may belong to another checkpoint"
    )
    check_error(folder, tmp_path, message)


def test_a_tensor_that_is_missing_or_unknown(tmp_path: Path) -> None:
    missing = {name: tensor for name, tensor in TENSORS.items() if name != "decoder_l1_rnn_Wf"}
    folder = write_folder(tmp_path / "missing", missing)
    message = (
        f"{MODEL} has no tensor 'decoder_l1_rnn_Wf', which its architecture needs; its configuration may belong to "
        "another checkpoint"
    )
    check_error(folder, tmp_path, message)
    folder = write_folder(tmp_path / "unknown", {**TENSORS, "encoder_l1_self_Wg": np.ones((1, 1), np.float32)})
    message = (
        f"{MODEL} has 1 tensors that its architecture does not use: encoder_l1_self_Wg; it may be an unsupported "
        "variant, so it is not imported"
    )
    check_error(folder, tmp_path, message)


def test_a_vocabulary_of_another_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    (folder / "vocab.ende.spm").write_bytes(write_vocabulary(VOCABULARY + 1))
    message = f"vocab.ende.spm has 18 tokens, but {MODEL} has only 17; they belong to different models: download both"
    check_error(folder, tmp_path, message)


@pytest.mark.usefixtures("unverified")
def test_links_that_leave_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    for name in ("vocab.ende.spm", MODEL):
        outside = (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(outside)
        check_error(folder, tmp_path, f"{name} is a symbolic link to a file outside of the folder")
