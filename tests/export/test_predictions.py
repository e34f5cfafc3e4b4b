"""Masked language models: import, verification, quantization, and the runner of the service."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_bundle
from sightline.export.check import verify as verification
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.import_errors import ImportFailedError, VerificationError
from sightline.export.options import BundleMetadata, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.service.runtime.ort import OnnxRunner
from tests.export.folders_of_others import word_tokenizer
from tests.support.tables import read_table
from tests.zoo.comparing import assert_equals_transformers, import_folder, random_texts
from tests.zoo.models import ENCODERS

DECODER = {
    "bert": ("cls.predictions.decoder", "cls.predictions.bias", "bert.embeddings.word_embeddings.weight"),
    "roberta": ("lm_head.decoder", "lm_head.bias", "roberta.embeddings.word_embeddings.weight"),
    "distilbert": ("vocab_projector", "vocab_projector.bias", "distilbert.embeddings.word_embeddings.weight"),
}


def save(folder: Path, name: str = "bert", **options: Any) -> Any:
    return ENCODERS[name].save(folder, f"{ENCODERS[name].start}ForMaskedLM", **options)


def write_folder(folder: Path, name: str = "bert", mask: str | None = "[MASK]", **options: Any) -> Any:
    """Write a folder of a masked language model, and return its model."""
    model = save(folder, name, **options)
    tokenizer = word_tokenizer(200)
    if mask is not None:
        tokenizer.add_special_tokens([mask])
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): tensor for name, tensor in changes.items()
    }
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.fixture
def export(few_sentences: None, tmp_path: Path) -> Any:
    """Return a function that exports a folder in this process, with the verification."""

    def run(folder: Path) -> tuple[Path, Manifest]:
        bundle = tmp_path / f"bundle-{folder.name}"
        return bundle, export_checkpoint(Export(folder, bundle, BundleMetadata("masked"))).manifest

    return run


@pytest.mark.parametrize("name", ["bert", "electra", "albert", "modernbert with biases"])
def test_a_bundle_is_verified_with_its_predictions(
    name: str, export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "model", name)
    compared: list[str] = []
    differences = verification.differences_of

    def record(given: Any, exact: Any) -> Any:
        compared.extend(given)
        return differences(given, exact)

    monkeypatch.setattr(verification, "differences_of", record)
    bundle, manifest = export(tmp_path / "model")
    assert {"predictions.0", "predictions.1"} <= set(compared)
    assert manifest.tasks == ("encode", "attention", "fill-mask", "sparse")
    assert manifest.tokens.mask_id == 200
    assert manifest.verification is not None and manifest.verification.max_logit_difference > 0
    model = onnx.load_model(bundle / "predict.onnx", load_external_data=False)
    table = {tensor.name: tensor for tensor in model.graph.initializer}["embedding"]
    encoder = onnx.load_model(bundle / "encoder.onnx", load_external_data=False)
    shared = {tensor.name: tensor for tensor in encoder.graph.initializer}["embedding"]
    assert list(table.external_data) == list(shared.external_data)  # stored once


def test_a_wrong_prediction_is_found(export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.export.graphs.model.activation", lambda graph, x, kind: graph.add("Tanh", x))
    write_folder(tmp_path / "model")
    with pytest.raises(VerificationError, match="predictions of tokens differ by"):
        export(tmp_path / "model")


@pytest.mark.parametrize(("mask", "config", "mask_id"), read_table(__file__, "masks"))
def test_mask_token(
    mask: str | None, config: dict[str, Any] | None, mask_id: int | None, export: Any, tmp_path: Path
) -> None:
    write_folder(tmp_path / "model", mask=mask)
    if config is not None:
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    _, manifest = export(tmp_path / "model")
    assert manifest.tokens.mask_id == mask_id
    assert ("fill-mask" in manifest.tasks) == (mask_id is not None)
    assert "sparse" in manifest.tasks


@pytest.mark.parametrize("name", DECODER)
def test_a_table_of_its_own_is_used(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name, tie_word_embeddings=False)
    imported = import_folder(tmp_path)
    assert imported.model.predictions is not None and not imported.model.predictions.is_tied
    assert_equals_transformers(imported, model, random_texts(model, [4]))


@pytest.mark.parametrize("name", DECODER)
def test_a_table_that_is_stored_as_the_projection_alone(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name)
    decoder, _, table = DECODER[name]
    stored = load_file(tmp_path / "model.safetensors")[table]
    change_tensors(tmp_path, **{f"{decoder}.weight": stored, table: None})
    assert_equals_transformers(import_folder(tmp_path), model, random_texts(model, [4]))


@pytest.mark.parametrize(
    ("name", "architecture", "decoder", "table"),
    [
        ("bert", "BertForPreTraining", "cls.predictions.decoder", "bert.embeddings.word_embeddings.weight"),
        ("albert", "AlbertForPreTraining", "predictions.decoder", "albert.embeddings.word_embeddings.weight"),
        ("deberta-v2", "DebertaV2ForMaskedLM", "cls.predictions.decoder", "deberta.embeddings.word_embeddings.weight"),
    ],
)
def test_a_table_that_is_stored_as_the_projection_of_a_head_that_is_not_used(
    name: str, architecture: str, decoder: str, table: str, tmp_path: Path
) -> None:
    model = ENCODERS[name].save(tmp_path, architecture)
    stored = load_file(tmp_path / "model.safetensors")[table]
    change_tensors(tmp_path, **{f"{decoder}.weight": stored, table: None})
    assert_equals_transformers(import_folder(tmp_path), model, random_texts(model, [4]))


@pytest.mark.parametrize("name", DECODER)
def test_a_table_that_is_stored_twice_must_have_the_same_values(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    decoder, bias, table = DECODER[name]
    copied = load_file(tmp_path / "model.safetensors")[table].clone()
    change_tensors(tmp_path, **{f"{decoder}.weight": copied})
    assert import_folder(tmp_path).model.predictions is not None
    copied[3, 4] += 1
    change_tensors(tmp_path, **{f"{decoder}.weight": copied})
    with pytest.raises(ImportFailedError, match=f"{decoder}.weight' differ, although tie_word_embeddings"):
        import_folder(tmp_path)
    change_tensors(tmp_path, **{f"{decoder}.weight": None})
    if bias == f"{decoder}.bias":
        return
    stored = load_file(tmp_path / "model.safetensors")[bias]
    change_tensors(tmp_path, **{bias: None, f"{decoder}.bias": stored})  # names of other versions
    assert import_folder(tmp_path).model.predictions is not None
    change_tensors(tmp_path, **{bias: stored + 1})
    with pytest.raises(ImportFailedError, match=f"{decoder}.bias' differ, although tie_word_embeddings"):
        import_folder(tmp_path)


def test_old_names_of_the_normalization(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert import_folder(tmp_path).model.predictions is not None


def test_a_checkpoint_without_the_head_or_with_a_part_of_it(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = [name for name in tensors if name.startswith("cls.")]
    save_file({name: one for name, one in tensors.items() if name not in head}, tmp_path / "model.safetensors")
    assert import_folder(tmp_path).model.predictions is None
    for name in ("cls.predictions.bias", "cls.predictions.transform.LayerNorm.weight"):
        save_file({key: one for key, one in tensors.items() if key != name}, tmp_path / "model.safetensors")
        with pytest.raises(ImportFailedError, match="has no tensor"):
            import_folder(tmp_path)


@pytest.mark.parametrize("bits", [8, 4, 32])
def test_quantized_predictions_and_rows_that_depend_on_no_others(bits: Any, export: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "electra")
    bundle, manifest = export(tmp_path / "model")
    if bits != 32:
        recipe = replace(QuantizationRecipe(bits), encoder="group-wise")
        quantize_bundle(bundle, tmp_path / "quantized", recipe, None, force=True)
        graph = onnx.load_model(tmp_path / "quantized" / "predict.onnx", load_external_data=False).graph
        assert [node.op_type for node in graph.node].count("MatMulNBits") == 2
        exact = OnnxRunner(bundle, manifest, num_threads=1, max_rows=1)
        bundle = tmp_path / "quantized"
    runner = OnnxRunner(bundle, read_bundle(bundle), num_threads=2, max_rows=1)
    if bits == 32:  # a packed copy of the table would need as much memory as the table
        options = runner._predict.get_session_options()
        assert options.get_session_config_entry("session.disable_prepacking") == "1"
    hidden = np.random.default_rng(0).standard_normal((67, runner.hidden_size)).astype(np.float32)
    whole = runner.predict(hidden)
    assert whole.shape == (67, 211)
    for rows in ([3], [66, 0], range(5, 38), range(64)):
        np.testing.assert_array_equal(runner.predict(hidden[list(rows)]), whole[list(rows)])
    if bits != 32:
        error = np.abs(whole - exact.predict(hidden)).mean() / np.abs(whole).mean()
        assert 0 < error < (0.05 if bits == 8 else 0.5)
    runner.terminate()
    with pytest.raises(Exception, match="terminate"):
        runner.predict(hidden)


@pytest.mark.parametrize(
    ("schemes", "products"),
    [({}, 2), ({"layers": "float32"}, 2), ({"encoder": "float32"}, 1), ({"projection": "float32"}, 1)],
)
def test_schemes_of_the_products(schemes: dict[str, Any], products: int, export: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    bundle, _ = export(tmp_path / "model")
    quantize_bundle(bundle, tmp_path / "quantized", replace(QuantizationRecipe(8), **schemes), None, force=True)
    graph = onnx.load_model(tmp_path / "quantized" / "predict.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node].count("MatMulNBits") == products


def sparse_files(kind: str = "sparse_encoder.modules.mlm_transformer.MLMTransformer") -> dict[str, Any]:
    """Return the files of a SparseEncoder by name, as sentence-transformers writes them."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.{kind}"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_SpladePooling",
            "type": "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
        },
    ]
    text = {"method": "forward", "method_output_name": "logits"}
    return {
        "modules.json": modules,
        "1_SpladePooling/config.json": {
            "pooling_strategy": "max",
            "activation_function": "relu",
            "embedding_dimension": None,
        },
        "sentence_bert_config.json": {
            "transformer_task": "fill-mask",
            "modality_config": {"text": text},
            "module_output_name": "token_embeddings",
            "max_seq_length": 17,
        },
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "6.2.0"},
            "default_prompt_name": None,
            "model_type": "SparseEncoder",
            "prompts": {"query": "word1 ", "document": ""},
            "similarity_fn_name": None,
        },
    }


def write_sparse(folder: Path, kind: str = "MLMTransformer", **changes: Any) -> None:
    """Write a SparseEncoder; `changes` are keys of its configurations."""
    write_folder(folder)
    whole = "sparse_encoder.modules.mlm_transformer.MLMTransformer"
    for name, content in sparse_files(
        whole if kind == "MLMTransformer" else f"base.modules.transformer.{kind}"
    ).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            content |= {key: value for key, value in changes.items() if key in content}
            content = {key: value for key, value in content.items() if value != "absent"}
        path.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["MLMTransformer", "Transformer"])
def test_a_sparse_encoder_is_imported_with_its_prompts_and_its_limit(kind: str, export: Any, tmp_path: Path) -> None:
    write_sparse(tmp_path / "model", kind)
    _, manifest = export(tmp_path / "model")
    assert "sparse" in manifest.tasks
    assert manifest.limits.max_source_tokens == 17
    assert manifest.embedding is not None and manifest.embedding.prompts == {"query": "word1 ", "document": ""}


@pytest.mark.parametrize(("kind", "changes", "message"), read_table(__file__, "sparse"))
def test_other_sparse_encoders_are_refused(
    kind: str, changes: dict[str, Any], message: str, export: Any, tmp_path: Path
) -> None:
    write_sparse(tmp_path / "model", kind, **changes)
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        export(tmp_path / "model")


def test_a_sparse_encoder_without_the_head_is_refused(export: Any, tmp_path: Path) -> None:
    write_sparse(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises(ImportFailedError, match="describes a model that computes sparse vectors, but the architecture"):
        export(tmp_path / "model")
