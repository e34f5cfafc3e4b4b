"""Checkpoints in GPTQ and AWQ, compared with Transformers, and their codes in 4 bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2Config

from sightline.export.check.verify import ComparedTexts, GraphRunner
from sightline.export.convert.quantize import exact_blocks, quantize_graphs
from sightline.export.graphs.builder import WeightFile
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.opened_checkpoint import open_folder
from tests.export.folders_of_others import word_tokenizer
from tests.export.packed_models import Packing, quantize
from tests.export.products import dequantized, separate
from tests.zoo.comparing import (
    assert_equals_transformers,
    assert_graphs_equal_the_reference,
    describe_folder,
    random_texts,
)
from tests.zoo.models import GPT2_LIKE, LLAMA_LIKE, random_model

SIZES: dict[str, Any] = {**LLAMA_LIKE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 2}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
QWEN2 = Qwen2Config(**SIZES, tie_word_embeddings=True)
CASES: dict[str, tuple[Any, Packing]] = {
    "gptq": (LLAMA, Packing(GPTQ, is_symmetric=True)),
    "gptq-zero-biases": (QWEN2, Packing(GPTQ, is_symmetric=True, has_zero_biases=True)),
    "gptq-zero-groups": (LLAMA, Packing(GPTQ | {"group_size": 16}, fills_groups=False)),
    "gptq-one-group": (LlamaConfig(**SIZES | {"hidden_size": 160}), Packing(GPTQ | {"group_size": -1})),
    "gptq-8-bits": (LLAMA, Packing(GPTQ | {"bits": 8})),
    "gptq-2-bits": (LLAMA, Packing(GPTQ | {"bits": 2})),
    "gptq-order": (
        Phi3Config(**SIZES | {"num_key_value_heads": 4}),
        Packing(GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}),
    ),
    "gptq-neox": (
        GPTNeoXConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}),
        Packing(GPTQ | {"group_size": 64}),
    ),
    "awq": (QWEN2, Packing(AWQ)),
    "awq-large-groups": (Phi3Config(**SIZES), Packing(AWQ | {"group_size": 64, "version": "GEMM"})),
    "awq-one-group": (LlamaConfig(**SIZES, attention_bias=True), Packing(AWQ | {"group_size": -1})),
}


def saved(folder: Path, name: str = "gptq", **options: Any) -> Any:
    config, packing = CASES[name]
    hf = random_model(config)
    quantize(hf, folder, Packing({**packing.options, **options}, packing.is_symmetric, packing.has_zero_biases,
                                 packing.fills_groups))  # fmt: skip
    return hf


@pytest.mark.parametrize("name", CASES)
def test_decoded_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    hf = saved(tmp_path, name)
    with open_folder(tmp_path) as opened:
        imported = describe_folder(opened)
        state = {one: value for one, value in hf.state_dict().items() if one in imported.weights.tensors}
        for tensor, value in state.items():
            np.testing.assert_array_equal(imported.weights.tensors.read(tensor), value.numpy(), tensor)
        others = imported.weights.tensors.names - state.keys() - {"embed_out.weight"}  # an older name of GPT-NeoX
        assert others == imported.weights.tensors.zeros
        assert bool(others) == CASES[name][1].has_zero_biases
        texts = random_texts(hf, [12, 1])
        assert_equals_transformers(imported, hf, texts)
        assert_graphs_equal_the_reference(imported, texts)


@pytest.mark.parametrize(
    ("name", "bits", "has_zeros"),
    [("gptq", 4, False), ("gptq-one-group", 4, True), ("awq", 4, True), ("awq", 8, False), ("gptq-2-bits", 4, False)],
)
def test_blocks_hold_the_codes_without_an_error(name: str, bits: Any, has_zeros: bool, tmp_path: Path) -> None:
    hf = saved(tmp_path, name)
    with open_folder(tmp_path) as opened:
        imported = describe_folder(opened)
        manifest = imported.write_bundle()
    graph = onnx.load(tmp_path / "decoder.onnx", load_external_data=False)
    matrices = {one.name: numpy_helper.to_array(one, str(tmp_path)) for one in graph.graph.initializer}
    (tmp_path / "new").mkdir()
    with WeightFile(tmp_path / "new" / "weights.bin") as file:
        (new,) = quantize_graphs([graph], tmp_path, file, QuantizationRecipe(bits, 16, projection="float32"), {})
    onnx.save_model(new, tmp_path / "new" / "decoder.onnx")
    arrays = {one.name: numpy_helper.to_array(one, str(tmp_path / "new")) for one in new.graph.initializer}
    products = [node for node in new.graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 10
    for node in products:
        original = matrices[node.input[1].removesuffix(".codes")]
        codes, scales = arrays[node.input[1]], arrays[node.input[2]]
        assert bool(node.input[3]) == has_zeros
        zeros = separate(arrays[node.input[3]], bits)[:, : scales.shape[1]] if has_zeros else None
        values = dequantized(codes, scales, zeros, bits)
        np.testing.assert_array_equal(values[:, : len(original)].T, original)
    text = random_texts(hf, [9]).sources
    runners = [GraphRunner(folder, manifest, imported.model) for folder in (tmp_path / "new", tmp_path)]
    given, expected = (runner.run(text, text, 1)[1]["logits.0"][-1] for runner in runners)
    # Only activations are rounded.
    assert given @ expected / np.linalg.norm(given) / np.linalg.norm(expected) > 0.99


def test_other_weights_are_not_taken_for_quantized_ones() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    codes = np.arange(16, dtype=np.float32) * np.float32(0.25)
    assert exact_blocks(rows, 4, 16) is None
    assert exact_blocks(rows.astype(np.float16).astype(np.float32), 4, 16) is None
    assert exact_blocks(codes[None] - 1, 4, 16) is not None
    assert exact_blocks(np.append(codes[:15], np.float32(4))[None] - 1, 4, 16) is None  # 17 steps
    assert exact_blocks(codes[None] + 1, 4, 16) is None  # from 4 to 19, where no code is 0
    assert exact_blocks(codes[None] * np.float32(1e20), 4, 16) is None


@pytest.mark.parametrize(("encoding", "bits", "block_size"), [("Q8_0", 8, 32), ("Q8_0", 8, 16), ("Q4_0", 4, 16)])
def test_blocks_hold_the_codes_of_gguf(encoding: str, bits: int, block_size: int) -> None:
    kind = gguf.GGMLQuantizationType[encoding]
    rows = np.random.default_rng(1).standard_normal((300, 96)).astype(np.float32)
    rows = gguf.dequantize(gguf.quantize(rows, kind), kind)
    exact = exact_blocks(rows, bits, block_size)
    assert exact is not None
    np.testing.assert_array_equal(dequantized(*exact, bits), rows)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_the_bundle_says_that_its_weights_were_quantized(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    hf = saved(folder, name)
    word_tokenizer(SIZES["vocab_size"]).save(str(folder / "tokenizer.json"))
    exported = export_checkpoint(Export(folder, tmp_path / "bundle", BundleMetadata("packed")))
    manifest = exported.manifest
    assert manifest.verification is not None and manifest.origin is not None
    assert manifest.origin.quantized == f"{name.upper()}, 4 bits"
    assert any(f"quantized before ({name.upper()}, 4 bits)" in note for note in exported.notes)
    assert exported.manifest.parameters == sum(value.numel() for value in hf.parameters())


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def options(**changes: Any) -> Edit:
    return lambda config, _: config["quantization_config"].update(changes)


def tensor(suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Edit:
    def edit(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        changed = change(tensors.pop(f"model.layers.0.mlp.up_proj.{suffix}"))
        if changed is not None:
            tensors[f"model.layers.0.mlp.up_proj.{suffix}"] = changed

    return edit


def without_codes(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(".qweight")]:
        del tensors[name]


def both(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(96, 64)


def bias(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(96)


ERRORS: dict[str, tuple[str, Edit, str]] = {
    "method": ("gptq", options(quant_method="bitsandbytes"), r"quantized \(bitsandbytes, 4 bits\), which is not"),
    "no method": ("gptq", options(quant_method=None), r"quantized \(an unnamed format, 4 bits\)"),
    "bits": ("gptq", options(bits=3), r"quantized \(gptq, 3 bits\), which is not supported"),
    "awq bits": ("awq", options(bits=8), r"quantized \(awq, 8 bits, version gemm\)"),
    "awq version": ("awq", options(version="gemv"), r"quantized \(awq, 4 bits, version gemv\)"),
    "awq zeros": ("awq", options(zero_point=False), "zero_point is false"),
    "marlin": ("gptq", options(is_marlin_format=True), "is_marlin_format is true"),
    "checkpoint format": ("gptq", options(checkpoint_format="marlin"), 'checkpoint_format is "marlin"'),
    "modules": ("gptq", options(dynamic={"-:lm_head": {}}), "dynamic is "),
    "key": ("gptq", options(rotation="hadamard"), r"has 1 keys that are not known .*: quantization_config\.rotation"),
    "group size": ("gptq", options(group_size=0), "group_size must be -1 or at least 1, got 0"),
    "groups": ("gptq", options(group_size=16), r"qzeros' has the shape \[3, 8\], but .* imply \[6, 8\]"),
    "order": ("gptq", tensor("g_idx", lambda one: one.flip(0)), "g_idx gives inputs other groups .* desc_act is false"),
    "zero point": ("gptq", tensor("qzeros", lambda one: torch.full_like(one, -1)), "has a zero point of 16"),
    "codes": (
        "gptq",
        tensor("qweight", lambda one: one.float()),
        "has the type F32, but quantized weights must be I32",
    ),
    "axes": ("gptq", tensor("qweight", lambda one: one.reshape(-1)), r"up_proj.qweight' must have 2 axes"),
    "scales": ("awq", tensor("scales", lambda _: None), "has no tensor 'model.layers.0.mlp.up_proj.scales'"),
    "nothing": ("gptq", without_codes, r"are quantized \(GPTQ, 4 bits\), but no tensor is"),
    "both": ("gptq", both, "has both model.layers.0.mlp.up_proj.weight and "),
    "bias": ("gptq", bias, "exclude this bias"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_other_formats_are_refused(case: str, tmp_path: Path) -> None:
    name, edit, message = ERRORS[case]
    saved(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    edit(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_folder(tmp_path) as opened, pytest.raises(ImportFailedError, match=message):
        describe_folder(opened).outputs(ComparedTexts(((5,),), ((5,),)))


def test_gpt2_stores_its_matrices_otherwise(tmp_path: Path) -> None:
    hf = random_model(GPT2Config(**GPT2_LIKE))
    hf.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    with open_folder(tmp_path) as opened, pytest.raises(ImportFailedError, match="except of GPT-2"):
        describe_folder(opened)
