"""Imports of Firefox folders to bundles, and each error that a user can cause."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tokenizers import Tokenizer

from sightline.base.bundle import Manifest, Origin, State, read_bundle
from sightline.base.errors import UsageError
from sightline.export import pipeline
from sightline.export.check.sessions import Sessions, encode, onnx_steps, open_sessions
from sightline.export.convert.quantize import quantize_graphs
from sightline.export.graphs.builder import WeightFile
from sightline.export.graphs.nodes import EXCLUDED
from sightline.export.import_errors import ImportFailedError, VerificationError
from sightline.export.options import BundleMetadata, ExportOptions, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.firefox.marian_binary import open_marian, read_file
from sightline.export.sources.firefox.shortlist import Shortlist, parse_shortlist
from sightline.export.sources.opened_checkpoint import FolderFiles
from sightline.model.decoding.processors import LogitsProcessors
from sightline.model.decoding.reference import greedy
from tests.export.firefox.models import VOCABULARY, random_tensors, write_folder, write_shortlist, write_vocabulary
from tests.export.firefox.reference import END_ID, FirefoxReference
from tests.support.export import main

TENSORS = random_tensors()
METADATA = BundleMetadata("imported", "", "MPL-2.0")
WITH_SHORTLIST = ExportOptions(shortlist=True)
MODEL, SHORTLIST = "model.ende.intgemm8.bin", "lex.50.50.ende.s2t.bin"
TEXTS = ["a b", "c", "d e f a", "g h i j k l", "m é"]
NEW_TOKENS = 8


@pytest.fixture(params=[False, True], ids=["one vocabulary", "two vocabularies"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "ende", random_tensors(separate=request.param, seed=4))


def import_firefox(folder: Path, bundle: Path, options: ExportOptions = ExportOptions()) -> Manifest:  # noqa: B008
    return export_checkpoint(Export(folder, bundle, METADATA, options, "firefox")).manifest


def shortlist_of(folder: Path, *, is_shared: bool) -> Shortlist:
    size = VOCABULARY if is_shared else VOCABULARY + 4
    data = read_file(folder / SHORTLIST)
    return parse_shortlist(data, SHORTLIST, source_size=size, target_size=VOCABULARY, is_shared=is_shared)


@pytest.mark.usefixtures("no_child")
def test_a_folder_becomes_a_verified_bundle(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    (folder / "metadata.json").write_text(
        json.dumps({"architecture": "tiny", "sourceLanguage": "en", "targetLanguage": "de", "version": "1.0"})
    )
    manifest = import_firefox(folder, tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle") == manifest
    assert manifest.languages is not None and manifest.verification is not None
    assert (manifest.languages.sources, manifest.languages.targets) == (("en",), ("de",))
    assert (manifest.architecture, manifest.training_unit) == ("firefox-tiny", "sentence")
    assert manifest.description == "Firefox translation model: en to de, tiny, version 1.0"
    assert manifest.states[-1].input != "shortlist"
    read = {path.name for path in folder.iterdir()} - {SHORTLIST}
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


# The shortlist


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


@pytest.mark.usefixtures("no_child")
def test_a_verified_shortlist_restricts_translations_as_in_the_reference(folder: Path, tmp_path: Path) -> None:
    manifest = import_firefox(folder, tmp_path / "bundle", WITH_SHORTLIST)
    assert manifest == read_bundle(tmp_path / "bundle") and manifest.verification is not None
    assert isinstance(manifest.origin, Origin) and SHORTLIST in manifest.origin.files
    state = State(input="shortlist", init="encoder", encoder_output="shortlist", shape=(VOCABULARY + 1,))
    assert manifest.states[-1] == state
    sessions = open_sessions(tmp_path / "bundle", manifest)
    tokenizer = Tokenizer.from_file(str(tmp_path / "bundle" / manifest.source_tokenizer))
    sources = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
    shortlist = shortlist_of(folder, is_shared=manifest.target_tokenizer == manifest.source_tokenizer)
    with open_marian(folder / MODEL) as marian:
        reference = FirefoxReference(marian)
    candidates = [[id_ for id_ in shortlist.candidates(source).tolist() if id_ != 1] for source in sources]
    pairs = list(zip(sources, candidates, strict=True))
    expected = [reference.translate(source, NEW_TOKENS + 1, allowed).ids for source, allowed in pairs]
    assert translations(sessions, sources) == expected
    everything = [id_ for id_ in range(VOCABULARY) if id_ != 1]
    assert expected != [reference.translate(source, NEW_TOKENS + 1, everything).ids for source in sources]


@pytest.mark.usefixtures("unverified")
def test_scores_of_a_shortlist_equal_its_candidates_in_any_batch(folder: Path, tmp_path: Path) -> None:
    manifest = import_firefox(folder, tmp_path / "bundle", WITH_SHORTLIST)
    sessions = open_sessions(tmp_path / "bundle", manifest)
    shortlist = shortlist_of(folder, is_shared=manifest.target_tokenizer == manifest.source_tokenizer)
    # The last source has no end token, which is also the padding.
    sources = [[5, 9, 3, 0], [7, 0], [0], list(range(1, 17)), [4]]
    batched = encode(sessions, sources)["shortlist"]
    for source, scores in zip(sources, batched, strict=True):
        expected = np.full(VOCABULARY + 1, EXCLUDED, np.float32)
        expected[shortlist.candidates(source)] = 0
        np.testing.assert_array_equal(scores, expected, strict=True)
        np.testing.assert_array_equal(encode(sessions, [source])["shortlist"][0], expected, strict=True)


@pytest.mark.usefixtures("unverified")
def test_the_projection_of_a_model_with_a_shortlist_is_recognised(folder: Path, tmp_path: Path) -> None:
    """Its scheme differs from that of the layers, so that a mistake would show."""
    manifest = import_firefox(folder, tmp_path / "bundle", WITH_SHORTLIST)
    decoder = onnx.load_model(tmp_path / "bundle" / manifest.decoder_graph.file, load_external_data=False)
    recipe = QuantizationRecipe(8, layers="float32", encoder="float32")
    with WeightFile(tmp_path / "quantized.bin") as weights:
        (quantized,) = quantize_graphs([decoder], tmp_path / "bundle", weights, recipe, {})
    assert [node.op_type for node in quantized.graph.node].count("MatMulNBits") == 1


# Errors


def check_error(folder: Path, tmp_path: Path, message: str, options: ExportOptions = ExportOptions()) -> None:  # noqa: B008
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        import_firefox(folder, tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"type": "s2s"},
            f"{MODEL}: special:model.yml: type must be 'transformer', got 's2s'; only the architecture of Firefox's "
            "translation models is supported",
        ),
        (
            {"dec-cell": "gru"},
            "special:model.yml: dec-cell must be 'ssru', got 'gru'; only the architecture of Firefox",
        ),
        ({"transformer-postprocess": "da"}, "transformer-postprocess must be 'dan', got 'da'; only the architecture"),
        ({"transformer-preprocess": "n"}, "transformer-preprocess must be '', got 'n'; only the architecture of"),
        ({"right-left": "true"}, "right-left is true, which is not supported"),
        (
            {"transformer-decoder-autoreg": "self-attention"},
            "special:model.yml: transformer-decoder-autoreg must be 'rnn', got 'self-attention'; only the architecture",
        ),
        ({"transformer-pool": "true"}, "transformer-pool is true, which is not supported; supported: absent or false"),
        (
            {"new-option": "1"},
            f"{MODEL}: special:model.yml has 1 keys that are not known for its architecture: new-option; they may "
            "change the outputs, so the checkpoint is not imported",
        ),
        ({"enc-depth": "0"}, "special:model.yml: enc-depth must be from 1 to 1000, got 0"),
        ({"enc-depth": "two"}, 'special:model.yml: enc-depth must be an integer, got "two"'),
        ({"enc-depth": "3"}, f"{MODEL} has no tensor 'encoder_l3_self_Wq', which its architecture needs"),
        ({"enc-depth": "1"}, f"{MODEL} has 16 tensors that its architecture does not use: encoder_l2_ffn_W1, "),
        ({"transformer-heads": "5"}, "dim-emb must be even, at least 4 and divisible by the 5 heads, got 12"),
        ({"dim-vocabs": "17"}, "dim-vocabs must be a list of two positive integers, the sizes of the source and the"),
        (
            {"dim-vocabs": "\n  - 18\n  - 17"},
            "dim-vocabs must be two equal sizes, because source and target share the table 'Wemb', got (18, 17)",
        ),
        ({"dim-vocabs": "\n  - 18\n  - 18"}, "the tensor 'Wemb' has the shape [17, 12], but special:model.yml of "),
        (
            {"transformer-dim-ffn": "21"},
            f"/{MODEL} implies [12, 21]; its configuration may belong to another checkpoint",
        ),
        (
            {"transformer-guided-alignment-layer": "2"},
            'transformer-guided-alignment-layer must be "last" or from 1 to 1, the number of decoder layers, got 2',
        ),
    ],
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


def test_a_shortlist_that_is_missing_or_of_another_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    other = write_folder(tmp_path / "other", random_tensors(separate=True))
    (folder / SHORTLIST).write_bytes((other / SHORTLIST).read_bytes())
    message = f"{SHORTLIST} is not a shortlist of this model: it must have 18 offsets for the source vocabulary, got 22"
    check_error(folder, tmp_path, message, WITH_SHORTLIST)
    (folder / SHORTLIST).unlink()
    message = f"ende has no shortlist {SHORTLIST}; download it to the folder, or import without --shortlist"
    check_error(folder, tmp_path, message, WITH_SHORTLIST)
    with pytest.raises(UsageError, match="is not a Firefox translation model, and only those have a shortlist"):
        export_checkpoint(Export(folder, tmp_path / "bundle", METADATA, WITH_SHORTLIST))


@pytest.mark.usefixtures("unverified")
def test_the_command_line_imports_a_shortlist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    arguments: list[Any] = [folder, "--out", tmp_path / "bundle", "--shortlist"]
    assert main(list(map(str, arguments))) == 0
    assert read_bundle(tmp_path / "bundle").states[-1].input == "shortlist"
    capsys.readouterr()
    assert main([str(checkpoint), "--out", str(tmp_path / "run"), "--shortlist"]) == 2
    assert "is a training run, and only Firefox translation models have a shortlist" in capsys.readouterr().err


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("frequent", "message"),
    [(1, "can generate tokens that are not in the shortlist of a text"), (VOCABULARY, "logits differ by 1e.04")],
)
def test_the_verification_finds_a_shortlist_of_another_model(tmp_path: Path, frequent: int, message: str) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    manifest = import_firefox(folder, tmp_path / "bundle", WITH_SHORTLIST)
    lists = [shortlist_of(folder, is_shared=True).translations(id_).tolist() for id_ in range(VOCABULARY)]
    (folder / SHORTLIST).write_bytes(write_shortlist(lists, frequent))
    with FolderFiles(folder) as files, pytest.raises(VerificationError, match=message):
        pipeline.compare(files, tmp_path / "bundle", manifest, WITH_SHORTLIST)


@pytest.mark.usefixtures("unverified")
def test_links_that_leave_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "ende", TENSORS)
    for name in (SHORTLIST, "vocab.ende.spm", MODEL):
        outside = (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(outside)
        check_error(folder, tmp_path, f"{name} is a symbolic link to a file outside of the folder", WITH_SHORTLIST)
