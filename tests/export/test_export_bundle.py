import contextlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from sightline.base.bundle import BundleError
from sightline.base.bundle_files import check_files, read_bundle, read_manifest, record_files, write_manifest
from sightline.base.errors import UsageError
from sightline.base.external_data import ExternalTensor, external_tensors
from sightline.export.check.verify import MAX_ROWS
from sightline.export.convert.conversions import half_bundle
from sightline.export.graphs.builder import WeightFile, external_tensor
from sightline.export.import_errors import ImportFailedError, VerificationError
from sightline.export.options import BundleMetadata
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_model, save_checkpoint
from sightline.model.config import CausalConfig
from sightline.model.data.tokenizer_training import read_tokenizer, train_tokenizer
from tests.export.folders import BUNDLE_FILES, names
from tests.support.training_runs import export_bundle, verify_bundle

LABEL = BundleMetadata("toy", "random weights", "Apache-2.0")


@pytest.fixture
def broken_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A weight differs from that of `checkpoint`."""
    folder = tmp_path / "broken"
    model, _ = load_model(checkpoint)
    with torch.no_grad():
        model.embedding.weight[3, 3] += 1
    save_checkpoint(folder, model.config, model.state_dict(), checkpoint / "tokenizer.json", {})
    return folder


def test_a_bundle_contains_exactly_the_files_of_its_manifest(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    assert names(bundle) == BUNDLE_FILES == {*manifest.files, "manifest.json"}
    assert (manifest.name, manifest.description, manifest.license) == ("toy", "random weights", "Apache-2.0")
    assert manifest.source_tokenizer == manifest.target_tokenizer == "tokenizer.json"
    assert manifest.tasks == ("generate", "encode", "attention")
    assert {part.kind: (part.layers, part.heads) for part in manifest.attention} == {
        "encoder": (2, 4),
        "cross": (2, 4),
        "decoder": (2, 4),
    }
    assert manifest.verification is not None
    assert manifest.verification.sentences == 3


def test_a_decoder_only_model_is_verified_with_a_long_sentence(checkpoint: Path, tmp_path: Path) -> None:
    """Only some positions of a sentence with more than `MAX_ROWS` tokens are compared."""
    path, sentence = checkpoint / "tokenizer.json", "Several people wait in the rain. " * 8
    tokenizer = read_tokenizer(path)
    assert len(tokenizer.encode(sentence).ids) > MAX_ROWS == 48
    model = CausalModel(
        CausalConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=2, d_ff=16, layers=1, max_positions=256)
    )
    save_checkpoint(tmp_path / "chat", model.config, model.state_dict(), path, {})
    manifest = export_bundle(tmp_path / "chat", tmp_path / "bundle", LABEL, ["A man sleeps.", sentence])
    assert manifest.verification is not None and manifest.verification.sentences == 2
    with torch.no_grad():
        model.norm.weight[3] += 0.01
    save_checkpoint(tmp_path / "changed", model.config, model.state_dict(), path, {})
    with pytest.raises(VerificationError, match="logits differ by"):
        verify_bundle(tmp_path / "bundle", tmp_path / "changed", [sentence])


def test_every_name_of_the_manifest_is_in_its_graph(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    for state in manifest.states:
        assert state.input in manifest.decoder_graph.inputs
        assert state.output is None or state.output in manifest.decoder_graph.outputs
        assert state.encoder_output is None or state.encoder_output in manifest.encoder_graph.outputs
    for attention in manifest.attention:
        graph = manifest.encoder_graph if attention.kind == "encoder" else manifest.decoder_graph
        assert set(attention.outputs) <= set(graph.outputs)


def test_a_manifest_that_is_written_reads_back_equal(bundle: Path, tmp_path: Path) -> None:
    manifest = read_manifest(bundle)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_another_schema_version_is_rejected_with_the_supported_one(copied: Path) -> None:
    path = copied / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "schema_version": 7}), encoding="utf-8")
    with pytest.raises(BundleError, match="has schema_version 7, this service needs 5"):
        read_manifest(copied)


def test_a_bundle_of_version_0_4_is_read_without_its_graph_that_compares_tokens(copied: Path) -> None:
    path = copied / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    tasks = [*document["tasks"], "similar"]
    path.write_text(json.dumps(document | {"tasks": tasks, "similar": document["encoder"]}), encoding="utf-8")
    assert read_bundle(copied).tasks == ("generate", "encode", "attention")


@pytest.mark.parametrize("name", sorted(BUNDLE_FILES - {"manifest.json"}))
def test_a_changed_file_is_rejected(copied: Path, name: str) -> None:
    path = copied / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match=f"{name} does not match the SHA-256 in the manifest"):
        check_files(copied, read_manifest(copied))


def test_a_file_with_two_links_is_rejected(copied: Path, tmp_path: Path) -> None:
    os.link(copied / "weights.bin", tmp_path / "second")
    with pytest.raises(BundleError, match=r"weights\.bin has 2 hard links"):
        read_bundle(copied)


@pytest.mark.parametrize("name", sorted(BUNDLE_FILES - {"manifest.json"}))
def test_a_file_that_is_used_and_not_listed_is_rejected(copied: Path, name: str) -> None:
    manifest = read_manifest(copied)
    files = {listed: record for listed, record in manifest.files.items() if listed != name}
    write_manifest(copied, manifest.model_copy(update={"files": files}))
    with pytest.raises(BundleError, match=f"does not list '{name}', which the bundle uses"):
        read_bundle(copied)


def test_unlisted_external_data_of_a_subgraph_is_rejected(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(bytes(4))
    os.link(tmp_path / "foreign", copied / "foreign.bin")
    model = onnx.load_model(copied / "step.onnx", load_external_data=False)
    with WeightFile(tmp_path / "foreign.bin") as weights:
        tensor = external_tensor("foreign", np.zeros(1, np.float32), weights)
    branch = helper.make_graph(
        [helper.make_node("Identity", ["foreign"], ["kept"])],
        "branch",
        [],
        [helper.make_tensor_value_info("kept", TensorProto.FLOAT, [1])],
        [tensor],
    )
    condition = onnx.numpy_helper.from_array(np.array(True), "condition")
    model.graph.initializer.append(condition)
    model.graph.node.append(helper.make_node("If", ["condition"], ["kept"], then_branch=branch, else_branch=branch))
    onnx.save_model(model, copied / "step.onnx")
    manifest = read_manifest(copied)
    files = manifest.files | record_files(copied, ["step.onnx"])
    write_manifest(copied, manifest.model_copy(update={"files": files}))
    with pytest.raises(BundleError, match=r"does not list 'foreign\.bin'"):
        read_bundle(copied)


def by_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def by_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):  # its address must be short
        listener.bind(path.name)


@pytest.mark.parametrize("replace", [by_link, by_fifo, by_folder, by_socket])
@pytest.mark.parametrize("name", sorted(BUNDLE_FILES))
def test_a_file_that_is_not_regular_is_rejected_and_not_read(
    copied: Path, name: str, replace: Callable[[Path], None]
) -> None:
    replace(copied / name)
    with pytest.raises(
        BundleError, match=f"{name} (is not|cannot be opened: .*; it must be) a (readable )?regular file"
    ):
        read_bundle(copied)


def test_a_device_is_rejected_and_not_read(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    graph = manifest.encoder_graph.model_copy(update={"file": "zero"})
    graphs = {
        "encoder": graph,
        "decoder": graph,
        "source_tokenizer": "zero",
        "target_tokenizer": "zero",
    }
    files = {"zero": manifest.files["weights.bin"]}
    with pytest.raises(BundleError, match="/dev/zero is not a regular file"):
        check_files(Path("/dev"), manifest.model_copy(update={**graphs, "files": files}))


def test_weights_that_are_not_finite_are_rejected_in_every_tensor(copied: Path) -> None:
    manifest, good = read_manifest(copied), (copied / "weights.bin").read_bytes()
    tensors = set[ExternalTensor]().union(
        *(external_tensors((copied / graph.file).read_bytes()) for graph in manifest.graphs)
    )
    assert {(tensor.file, tensor.data_type) for tensor in tensors} == {("weights.bin", TensorProto.FLOAT)}
    assert sum(tensor.size for tensor in tensors) * 4 > 0.9 * len(good)
    for tensor, value in itertools.product(tensors, (np.nan, -np.inf)):
        weights = bytearray(good)
        start = tensor.offset + tensor.size // 2 * 4
        weights[start : start + 4] = np.float32(value).tobytes()
        (copied / "weights.bin").write_bytes(weights)
        files = manifest.files | record_files(copied, ["weights.bin"])
        with pytest.raises(BundleError, match=r"copied/weights\.bin has weights that are not finite numbers"):
            check_files(copied, manifest.model_copy(update={"files": files}))


def test_nothing_in_a_bundle_is_pickled(bundle: Path) -> None:
    for path in bundle.iterdir():
        head = path.read_bytes()[:4]
        assert not head.startswith((b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")), path


def test_a_weight_that_is_no_number_is_rejected(checkpoint: Path, tmp_path: Path, toy_sentences: list[str]) -> None:
    model, _ = load_model(checkpoint)
    with torch.no_grad():
        model.embedding.weight[3, 3] = torch.nan
    save_checkpoint(tmp_path / "nan", model.config, model.state_dict(), checkpoint / "tokenizer.json", {})
    with pytest.raises(ImportFailedError, match=r"embedding\.weight has values that are not finite float32 numbers"):
        export_bundle(tmp_path / "nan", tmp_path / "out", LABEL, toy_sentences[:1])
    assert not (tmp_path / "out").exists()


def test_a_bundle_that_fails_verification_is_not_written_and_keeps_the_existing_one(
    checkpoint: Path, copied: Path, toy_sentences: list[str]
) -> None:
    before = read_bundle(copied)
    for out in (copied, copied.with_name("new")):
        with pytest.raises(VerificationError, match="differ by"):
            export_bundle(checkpoint, out, LABEL, toy_sentences[1:2], tolerance=0)
    assert read_bundle(copied) == before
    assert names(copied.parent) == {"copied"}


def test_replacing_a_bundle_keeps_files_that_its_manifest_does_not_name(
    checkpoint: Path, copied: Path, toy_sentences: list[str]
) -> None:
    (copied / "MODEL_CARD.md").write_text("# Toy\n", encoding="utf-8")
    manifest = read_manifest(copied)
    (copied / "twin.onnx").write_bytes(b"of an older form")
    twin = manifest.files | {"twin.onnx": manifest.files["step.onnx"]}
    write_manifest(copied, manifest.model_copy(update={"files": twin}))
    export_bundle(checkpoint, copied, BundleMetadata("renamed"), toy_sentences[:1], check=False)
    assert names(copied) == BUNDLE_FILES | {"MODEL_CARD.md"}
    assert (copied / "MODEL_CARD.md").read_text(encoding="utf-8") == "# Toy\n"
    assert read_bundle(copied).name == "renamed"
    assert names(copied.parent) == {"copied"}


def test_an_export_that_cannot_move_its_bundle_keeps_the_existing_one(
    checkpoint: Path, copied: Path, toy_sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = read_bundle(copied), Path.rename

    def fail_for_new(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(checkpoint, copied, LABEL, toy_sentences[:1], check=False)
    assert read_bundle(copied) == before
    assert names(copied.parent) == {"copied"}


@pytest.mark.parametrize("is_moved", [False, True])
def test_an_export_cleans_up_after_one_that_was_killed(
    checkpoint: Path, copied: Path, toy_sentences: list[str], is_moved: bool
) -> None:
    """The export is killed before the new bundle is in place, or before the old one is removed."""
    (copied / "MODEL_CARD.md").write_text("# Toy\n", encoding="utf-8")
    old, new = copied.with_name(".copied.old"), copied.with_name(".copied.new")
    shutil.copytree(copied, old)
    if is_moved:
        (old / "MODEL_CARD.md").unlink()  # its removal had begun
    else:
        copied.rename(new)
        (new / "MODEL_CARD.md").unlink()  # not copied yet
    export_bundle(checkpoint, copied, BundleMetadata("renamed"), toy_sentences[:1], check=False)
    assert names(copied.parent) == {"copied"}
    assert names(copied) == BUNDLE_FILES | {"MODEL_CARD.md"}
    assert read_bundle(copied).name == "renamed"


def test_a_folder_with_folders_is_no_bundle_to_replace(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(UsageError, match="is not a bundle"):
        export_bundle(checkpoint, tmp_path, LABEL, toy_sentences[:1])
    assert (tmp_path / "precious").is_dir()


def test_an_export_is_the_same_each_time(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    again = export_bundle(checkpoint, tmp_path / "again", LABEL, ["A dog."], check=False)
    assert again.files == read_manifest(bundle).files


def test_a_bundle_on_disk_is_verified_against_its_checkpoint(
    bundle: Path, checkpoint: Path, broken_checkpoint: Path, toy_sentences: list[str]
) -> None:
    assert verify_bundle(bundle, checkpoint, toy_sentences[1:2]).different_generations == 0
    with pytest.raises(VerificationError):
        verify_bundle(bundle, broken_checkpoint, toy_sentences[1:2])


def test_a_damaged_bundle_is_not_verified(copied: Path, checkpoint: Path, toy_sentences: list[str]) -> None:
    (copied / "step.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"step\.onnx"):
        verify_bundle(copied, checkpoint, toy_sentences[:1])


def test_a_bundle_with_another_tokenizer_is_not_verified(
    bundle: Path, checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    train_tokenizer(toy_sentences, vocab_size=300).save(str(other / "tokenizer.json"))
    with pytest.raises(BundleError, match="differs from the tokenizer of the checkpoint"):
        verify_bundle(bundle, other, toy_sentences[:1])


def test_half_weights_halve_the_file_and_are_the_reference_of_verification(
    checkpoint: Path, bundle: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    half = tmp_path / "half"
    manifest = export_bundle(checkpoint, half, LABEL, toy_sentences[1:2], half_weights=True)
    assert (manifest.half_weights, manifest.dtype) == (True, "float32")
    assert manifest.files["weights.bin"].bytes < 0.6 * read_manifest(bundle).files["weights.bin"].bytes
    assert verify_bundle(half, checkpoint, toy_sentences[1:2]) == manifest.verification
    write_manifest(half, manifest.model_copy(update={"half_weights": False}))
    with pytest.raises(VerificationError, match="differ by"):
        verify_bundle(half, checkpoint, toy_sentences[1:2])


def test_a_weight_that_float16_cannot_hold_is_rejected(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    model, _ = load_model(checkpoint)
    with torch.no_grad():
        model.embedding.weight[3, 3] = 70_000
    folder = tmp_path / "large"
    save_checkpoint(folder, model.config, model.state_dict(), checkpoint / "tokenizer.json", {})
    with pytest.raises(ValueError, match=r"embedding.weight has weights beyond ±65504"):
        export_bundle(folder, tmp_path / "out", LABEL, toy_sentences, half_weights=True)


def test_half_weights_are_not_quantised_again(checkpoint: Path, tmp_path: Path, toy_sentences: list[str]) -> None:
    export_bundle(checkpoint, tmp_path / "half", LABEL, toy_sentences[:1], half_weights=True, check=False)
    with pytest.raises(BundleError, match="without --half-weights"):
        half_bundle(tmp_path / "half", tmp_path / "again", None)
