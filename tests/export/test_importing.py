"""Imports from a folder to a bundle, and each error that a user can cause."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from sightline.__main__ import main as sightline
from sightline.base.bundle import BundleError, Manifest, Verification
from sightline.base.bundle_files import read_bundle, read_manifest
from sightline.base.errors import UsageError
from sightline.export import pipeline
from sightline.export.card import model_card
from sightline.export.check.sessions import encode, open_sessions
from sightline.export.describe import describe_source
from sightline.export.import_errors import ImportFailedError, VerificationError
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.opened_checkpoint import Folder, Provenance, detect_kind
from sightline.export.sources.run_folder import RunRecord
from sightline.service.engine.observer import EngineObserver
from sightline.service.inference.dense import read_dense
from sightline.service.loading import load_backend
from sightline.service.settings import Settings
from tests.export.folders_of_others import bert_tensors, word_tokenizer, write_bert
from tests.support.export import main
from tests.support.training_runs import omit_check
from tests.zoo.folders import modules

METADATA = BundleMetadata("imported", "a test", "MIT")
NOTHING: Mapping[str, Any] = {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bert(tmp_path / "checkpoint")


def test_a_folder_becomes_a_verified_bundle(folder: Path, tmp_path: Path) -> None:
    provenance = Provenance("owner/name", "0" * 40)
    imported = export_checkpoint(Export(folder, tmp_path / "bundle", METADATA, provenance=provenance))
    manifest = read_bundle(tmp_path / "bundle")
    assert manifest == imported.manifest and (manifest.name, manifest.license) == ("imported", "MIT")
    assert manifest.verification is not None and manifest.tasks == ("encode", "attention")
    assert manifest.origin is not None
    assert (manifest.origin.repository, manifest.origin.revision) == ("owner/name", "0" * 40)
    assert manifest.origin.files.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert imported.peak_bytes > 1 << 20
    tokenizer = Tokenizer.from_file(str(tmp_path / "bundle" / "tokenizer.json"))
    assert tokenizer.truncation is None and tokenizer.padding is None
    hidden = encode(open_sessions(tmp_path / "bundle", manifest), [[2, 9, 11, 3]])["hidden"]
    assert hidden.shape == (1, 4, 16) and np.isfinite(hidden).all()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("unverified")
def test_float16_and_bfloat16_weights_become_the_same_float32(folder: Path, tmp_path: Path) -> None:
    halves = {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in bert_tensors().items()}
    digests = []
    for convert in (torch.Tensor.bfloat16, torch.Tensor.float):
        torch.save({name: convert(half) for name, half in halves.items()}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink(missing_ok=True)
        manifest = export_checkpoint(Export(folder, tmp_path / "bundle", METADATA)).manifest
        assert manifest.origin is not None and manifest.origin.pickle
        digests.append(manifest.files["weights.bin"])
    assert digests[0] == digests[1]


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("pair", [None, "[CLS] $A $B:1"])
def test_a_tokenizer_without_a_form_of_pairs_refuses_pairs_alone(
    pair: str | None, folder: Path, tmp_path: Path
) -> None:
    tokenizer = word_tokenizer()
    special = [("[CLS]", 2)]
    template = pair and processors.TemplateProcessing(single="[CLS] $A", pair=pair, special_tokens=special)
    tokenizer.post_processor = template or processors.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    exported = export_checkpoint(Export(folder, tmp_path / "bundle", METADATA))
    assert not exported.manifest.reads_pairs
    assert any(note.startswith("pairs of texts are refused") for note in exported.notes)


def added(id_: int, content: str, **options: bool) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(id_): {"content": content, **options}}}


OTHER_TOKEN = "but tokenizer.json: it is none, or one of other options."
BERT_OPTIONS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
# What tokenizer_config.json has, and the note about it.
CONTRADICTIONS: Mapping[str, tuple[dict[str, Any], str]] = {
    "lowercase": ({"do_lower_case": True}, "has do_lower_case true, but tokenizer.json: false."),
    "prefix": ({"add_prefix_space": True}, "has add_prefix_space true, but tokenizer.json: false."),
    "added": (added(4, "word0", special=False), f"has an added token 'word0', {OTHER_TOKEN}"),
    "options": (added(2, "[CLS]", special=True, lstrip=True), f"has an added token '[CLS]', {OTHER_TOKEN}"),
    "padding": (
        {"pad_token": "[SEP]"},
        "has the pad_token [SEP], whose id is 3, but the configuration has the id 0, which",
    ),
    "none": (
        {"do_lower_case": False, "add_prefix_space": False, "pad_token": "[PAD]", "eos_token": "[CLS]"}
        | added(2, "[CLS]", special=True),
        "",
    ),
    **{option: ({option: False}, f"has {option} false, but tokenizer.json: true.") for option in BERT_OPTIONS},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_of_the_files_of_a_tokenizer_are_noted(case: str, folder: Path) -> None:
    config, note = CONTRADICTIONS[case]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = word_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if case in BERT_OPTIONS:
        tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    opened = Folder(folder)
    model = describe_source(opened, ExportOptions())
    starts = [text.removeprefix("tokenizer_config.json ")[: len(note)] for text in model.notes]
    assert starts == ([note] if note else [])


@pytest.mark.usefixtures("few_sentences")
def test_keys_that_the_user_ignores_are_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, auto_map={}, embedding_twist=2, note="x")
    words = [str(folder), "--out", str(tmp_path / "bundle"), "--ignore-key", "embedding_twist", "--ignore-key"]
    assert main([*words, "hidden_size"]) == 2
    error = (
        "--ignore-key hidden_size: config.json has no unknown key of this name; its unknown keys are embedding_twist, n"
    )
    assert error in capsys.readouterr().err
    assert main([*words, "note"]) == 0
    note = "note: config.json has keys that do not change the model and are ignored: embedding_twist, note\n"
    assert note in capsys.readouterr().err
    manifest = read_manifest(tmp_path / "bundle")
    assert manifest.origin is not None and manifest.origin.ignored_keys == ("embedding_twist", "note")
    assert "| ignored keys | embedding_twist, note |" in model_card(manifest, RunRecord())
    assert sightline(["verify", str(tmp_path / "bundle"), "--checkpoint", str(folder)]) == 0


@pytest.mark.usefixtures("few_sentences")
def test_sightline_verify_compares_an_imported_bundle_with_its_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    record = export_checkpoint(Export(folder, bundle, METADATA)).manifest.verification
    arguments = ["verify", str(bundle), "--checkpoint", str(folder)]
    assert sightline(arguments) == 0
    assert Verification.model_validate_json(capsys.readouterr().out) == record
    tensors = bert_tensors()
    tensors["encoder.layer.1.output.dense.weight"][3] += 0.01
    save_file(tensors, folder / "model.safetensors")
    assert sightline(arguments) == 1
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1
    assert errors.startswith(f"error: {bundle} and its checkpoint differ: hidden differ by ")
    assert "; please report this checkpoint" in errors


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def drop_tensor(folder: Path) -> None:
    kept = {name: array for name, array in bert_tensors().items() if name != "encoder.layer.1.output.dense.weight"}
    save_file(kept, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def clear(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def become_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def only(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        clear(folder)
        (folder / name).write_text("")

    return change


ERRORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "unsupported architecture": (
        lambda folder: edit(folder, architectures=["DebertaV2Model"], model_type="xlnet"),
        "config.json: model_type 'xlnet' is not supported; supported are albert, ",
    ),
    "no architecture": (
        lambda folder: edit(folder, architectures=None, model_type=None),
        "config.json: model_type '' is not supported; supported are ",
    ),
    "remote code": (
        lambda folder: edit(folder, model_type="chatglm", auto_map={"AutoModel": "modeling.NewModel"}),
        "'chatglm' is not supported; it needs Python code of its repository (auto_map), which is never run; supp",
    ),
    "missing config": (lambda folder: (folder / "config.json").unlink(), "is not a checkpoint: it has neither config"),
    "missing weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has neither model.safetensors nor ",
    ),
    "missing tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "missing key": (
        lambda folder: edit(folder, hidden_size=None),
        "config.json: hidden_size must be an integer, got n",
    ),
    "unknown key": (
        lambda folder: edit(folder, transformers_version="99.0", embedding_twist=2),
        "config.json has 1 keys that are not known for its architecture: embedding_twist; they may change the outputs",
    ),
    "long key": (
        lambda folder: edit(folder, transformers_version="99.0", **{"k" * 100_000: 2}),
        "kkk; they may change the outputs, so the checkpoint is not imported; --ignore-key NAME imports it without",
    ),
    "unknown tensor": (
        lambda folder: save_file(
            bert_tensors() | {"encoder.extra": np.ones(2, np.float32)}, folder / "model.safetensors"
        ),
        "has 1 tensors that its architecture does not use: encoder.extra; it may be an unsupported variant",
    ),
    "missing tensor": (
        drop_tensor,
        "has no tensor 'encoder.layer.1.output.dense.weight', which its architecture needs",
    ),
    "truncated": (truncate, "model.safetensors is truncated or not a valid safetensors file: "),
    "wrong tokenizer": (
        lambda folder: word_tokenizer(50).save(str(folder / "tokenizer.json")),
        "the tokenizer has token ids up to 49, but the model has only 40 tokens; the tokenizer files belong to another",
    ),
    "damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "files of the tokenizer cannot be used: ",
    ),
    "two ids of a token": (
        lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps(added(7, "[CLS]", special=True))),
        "gives the token '[CLS]' the id 7, but tokenizer.json 2; correct",
    ),
    "file": (become_file, "checkpoint is a file; name the folder of a checkpoint"),
    "empty folder": (clear, "checkpoint is not a checkpoint: it has neither config.json"),
    "missing folder": (shutil.rmtree, "checkpoint does not exist; name the folder of a checkpoint"),
    "gguf": (only("model-q4.gguf"), "name the folder that has it, or a GGUF file instead of its folder"),
    "other files": (only("README.md"), "is not a checkpoint: it has neither config.json"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_the_user_is_one_complete_line_and_writes_nothing(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = ERRORS[name]
    change(folder)
    expected = 2 if name in ("file", "missing folder") else 1
    assert main([str(folder), "--out", str(tmp_path / "out" / "bundle")]) == expected
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith("error: ") and errors.count("\n") == 1
    assert message in errors and len(errors) < 2200
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_terminal_shows_the_time_of_the_check(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "check", differ)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(VerificationError):
        export_checkpoint(Export(folder, tmp_path / "bundle", METADATA))
    assert "verifying: 00:0" in capsys.readouterr().err


def test_too_little_memory_is_an_error_with_the_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "available_memory", lambda: 200_000_000)
    with pytest.raises(ImportFailedError, match=r"needs about 0.5 GB of memory, but 0.2 GB are available; end other"):
        export_checkpoint(Export(folder, tmp_path / "bundle", METADATA))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.usefixtures("unverified")
def test_a_full_disk_is_an_error_that_leaves_nothing(
    folder: Path, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk becomes full while each of the files is written, because it grows by one page."""
    messages = set()
    for kibibytes in range(4, 400, 4):
        disk = small_disk(kibibytes)
        code = main([str(folder), "--out", str(disk / "bundle")])
        errors = capsys.readouterr().err
        if code == 0:
            break
        messages.add(errors)
        assert code == 1
        assert list(disk.iterdir()) == []
    read_bundle(disk / "bundle")
    assert messages == {
        f"error: {disk / 'bundle'} cannot be written: No space left on device; remove files, or choose another --out; "
        "no incomplete bundle is left\n"
    }
    # With the disk full now, the old bundle stays.
    before = (disk / "bundle" / "manifest.json").read_bytes()
    assert main([str(folder), "--out", str(disk / "bundle"), "--license", "other"]) == 1
    assert (disk / "bundle" / "manifest.json").read_bytes() == before
    assert [path.name for path in disk.iterdir()] == ["bundle"]


def test_a_file_that_is_larger_than_the_limit_is_an_error(folder: Path, tmp_path: Path) -> None:
    program = (
        "import resource, sys\nfrom sightline.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        f"sys.exit(main(['export', {str(folder)!r}, '--out', {str(tmp_path / 'out' / 'bundle')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'out' / 'bundle'} cannot be written: File too large; remove")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def write_dense(folder: Path, weight: Any, bias: Any = None, changes: Mapping[str, Any] = NOTHING) -> None:
    """Turn a checkpoint into a sentence-transformers folder with a layer after pooling."""
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": bias is not None,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir(exist_ok=True)
    kinds = modules("Transformer", "Pooling", "Dense", "Normalize")
    (folder / "modules.json").write_text(json.dumps(kinds))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config | dict(changes)))
    tensors = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
    save_file(tensors, folder / "2_Dense" / "model.safetensors")


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("is_pickle", [False, True])
def test_layers_after_pooling_are_files_of_the_bundle(folder: Path, tmp_path: Path, is_pickle: bool) -> None:
    generator = np.random.default_rng(3)
    weight, bias = (generator.standard_normal(shape).astype(np.float32) for shape in ((5, 16), (5,)))
    write_dense(folder, weight, bias)
    name = "2_Dense/model.safetensors"
    if is_pickle:
        (folder / name).unlink()
        name = "2_Dense/pytorch_model.bin"
        torch.save({"linear.weight": torch.from_numpy(weight), "linear.bias": torch.from_numpy(bias)}, folder / name)
    manifest = export_checkpoint(Export(folder, tmp_path / "bundle", METADATA)).manifest
    assert read_bundle(tmp_path / "bundle") == manifest
    assert manifest.embedding is not None and manifest.origin is not None
    assert (manifest.embedding.pooling, manifest.embedding.normalize) == ("first", True)
    (layer,) = manifest.embedding.dense
    assert (layer.inputs, layer.outputs, layer.has_bias, layer.activation) == (16, 5, True, "tanh")
    assert name in manifest.origin.files and manifest.origin.pickle is is_pickle
    read = read_dense(tmp_path / "bundle", layer)
    vector = generator.standard_normal(16).astype(np.float32)
    # Sums of 17 products in float32.
    error = (4 + 17**0.5) * 2.0**-24 * (np.abs(weight) @ np.abs(vector) + np.abs(bias)).max()
    np.testing.assert_allclose(read.apply(vector), np.tanh(weight @ vector + bias), rtol=0, atol=error)
    path = tmp_path / "bundle" / layer.file
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BundleError, match=r"dense\.0\.bin must have 85 numbers, got 84; export the bundle again"):
        read_dense(tmp_path / "bundle", layer)
    np.full(85, np.nan, np.float32).tofile(path)
    with pytest.raises(BundleError, match=r"dense\.0\.bin has weights that are not finite numbers"):
        read_dense(tmp_path / "bundle", layer)


@pytest.mark.usefixtures("unverified")
def test_layers_after_pooling_that_do_not_fit_are_not_served(folder: Path, tmp_path: Path) -> None:
    write_dense(folder, np.ones((5, 16), np.float32), np.ones(5, np.float32))
    export_checkpoint(Export(folder, tmp_path / "bundle", METADATA))
    path = tmp_path / "bundle" / "manifest.json"
    document = json.loads(path.read_text())
    (layer,) = document["embedding"]["dense"]
    document["embedding"]["dense"] = [layer, layer]
    path.write_text(json.dumps(document))
    with pytest.raises(BundleError, match=r"a layer of embedding\.dense has 16 inputs after one with 5 outputs"):
        read_manifest(tmp_path / "bundle")
    document["embedding"]["dense"] = [layer | {"inputs": 4, "outputs": 17}]  # as many numbers
    path.write_text(json.dumps(document))
    message = r"embedding\.dense reads vectors of 4 numbers, but the hidden states have 16"
    with pytest.raises(BundleError, match=message):
        load_backend(Settings(bundles=tmp_path, threads=1), lambda _: EngineObserver())


@pytest.mark.parametrize(
    ("shape", "bias", "changes", "message"),
    [
        ((5, 12), None, {}, "from 12 to 5 numbers after vectors of 16 has a weight of shape .5, 12.; the folder may"),
        ((5, 16), None, {"out_features": 6}, "from 16 to 6 numbers after vectors of 16 has a weight of shape .5, 16."),
        ((5, 16), None, {"bias": True}, "has no tensor 'linear.bias'"),
        ((5, 16), np.ones(6, np.float32), {}, "numbers after vectors of 16 has a bias of shape .6.; the folder may"),
    ],
)
def test_layers_after_pooling_must_fit(
    shape: tuple[int, int], bias: Any, changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    write_dense(folder, np.ones(shape, np.float32), bias, changes)
    with pytest.raises(ImportFailedError, match=message):
        export_checkpoint(Export(folder, tmp_path / "bundle", METADATA))
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ImportFailedError, match=r"2_Dense has neither model\.safetensors"):
        export_checkpoint(Export(folder, tmp_path / "bundle", METADATA))


@pytest.mark.usefixtures("unverified")
def test_only_an_encoder_decoder_can_be_a_model_of_sentences(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--unit sentence is only for encoder-decoder models"):
        export_checkpoint(Export(folder, tmp_path / "bundle", BundleMetadata("imported", training_unit="sentence")))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.usefixtures("unverified")
def test_a_task_that_the_model_cannot_do_is_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot do the task generate; it can do encode, attention;"):
        export_checkpoint(Export(folder, tmp_path / "bundle", METADATA, ExportOptions(task="generate")))
    export_checkpoint(Export(folder, tmp_path / "bundle", METADATA, ExportOptions(task="encode")))


def test_an_output_that_is_no_bundle_is_kept(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home" / "photos").mkdir(parents=True)
    (tmp_path / "file").write_text("text")
    for name in ("home", "file"):
        assert main([str(folder), "--out", str(tmp_path / name)]) == 2
        assert f"error: {tmp_path / name} exists and is not a bundle" in capsys.readouterr().err
    assert (tmp_path / "home" / "photos").is_dir() and (tmp_path / "file").read_text() == "text"


def differ(*_: object) -> Manifest:
    raise VerificationError("hidden states differ")


def test_a_bundle_that_fails_verification_does_not_replace_the_old_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "check", omit_check)
        export_checkpoint(Export(folder, tmp_path / "bundle", METADATA))
    before = (tmp_path / "bundle" / "manifest.json").read_bytes()
    monkeypatch.setattr(pipeline, "check", differ)
    with pytest.raises(VerificationError, match="hidden states differ"):
        export_checkpoint(Export(folder, tmp_path / "bundle", BundleMetadata("other")))
    assert (tmp_path / "bundle" / "manifest.json").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_kinds_are_recognised_by_their_files(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert (detect_kind(folder), detect_kind(checkpoint)) == ("huggingface", "training")
    for name in ("model.ende.intgemm.alphas.bin", "model.ende.intgemm8.bin", "model.ende.intgemm.alphas.bin.gz"):
        only(name)(tmp_path / "checkpoint")
        assert detect_kind(tmp_path / "checkpoint") == "firefox"
    (tmp_path / "model.gguf").write_text("")
    assert detect_kind(tmp_path / "model.gguf") == "gguf"


@pytest.mark.usefixtures("unverified")
def test_the_command_line_prints_the_result_and_keeps_the_description(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    assert main([str(folder), "--out", str(out), "--license", "MIT", "--max-tokens", "9"]) == 0
    output, errors = capsys.readouterr()
    assert output.startswith(f"{out}: 5,536 parameters, SHA-256 ") and '"different_generations": 0' in output
    assert errors.startswith("peak memory: ") and errors.count("\n") == 1
    assert main([str(folder), "--out", str(out)]) == 0
    manifest = read_manifest(out)
    assert (manifest.name, manifest.license, manifest.limits.max_source_tokens) == ("mine", "MIT", 24)
    with pytest.raises(SystemExit):
        main([str(folder), "--out", str(out), "--max-tokens", "0"])
    assert "--max-tokens must be a whole number, at least 1, got '0'" in capsys.readouterr().err


def test_an_import_loads_no_pytorch(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'sacrebleu']))\n"
        "if __name__ == '__main__':\n"
        f"    from sightline.__main__ import main; sys.exit(main(['export', {str(folder)!r}, '--out', 'bundle']))"
    )
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_bundle(tmp_path / "bundle").verification is not None
