"""Conversion of GGUF files, which the package of llama.cpp writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from sightline.base.bundle_files import read_bundle, sha256_of, write_manifest
from sightline.export.families.description import Description
from sightline.export.families.table import describe, find_family
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.gguf import GgufFile, _llama3_scaling, convert
from sightline.export.sources.opened_checkpoint import Folder
from tests.support.export import main
from tests.support.tables import read_table
from tests.zoo.models import LLAMA3, LLAMA_LIKE, YARN, random_model

Array = NDArray[Any]
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
LETTERS = [chr(33 + index) for index in range(90)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *LETTERS, "Ġ", "Ċ", "ab", "Ġa", "Ġab", "12", "123", "<tool>"]
MERGES = ["a b", "Ġ a", "Ġ ab", "1 2", "12 3"]
KINDS = [*[CONTROL] * 3, *[1] * (len(TOKENS) - 4), USER_DEFINED]
TEMPLATE = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
TIED = {"tie_word_embeddings": True}
SIZES = LLAMA_LIKE | {"vocab_size": len(TOKENS), "eos_token_id": 2, "bos_token_id": 1}
BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}  # rows of whole blocks
ROPE = {"rope_theta": 500000.0}
MODELS: Mapping[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, **TIED, head_dim=12, rms_norm_eps=1e-5),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-3.1": LlamaConfig(
        **SIZES, head_dim=20, rope_parameters=LLAMA3 | ROPE | {"factor": 32.0, "original_max_position_embeddings": 8192}
    ),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters={**ROPE, "rope_type": "linear", "factor": 2.0}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-yarn": Qwen2Config(**SIZES, **TIED, rope_parameters={**ROPE, **YARN}),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
}


def permuted(array: Array, heads: int) -> Array:
    """Interleave the halves of heads, as convert_hf_to_gguf.py of llama.cpp does."""
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def add_tokenizer(writer: GGUFWriter, pre: str = "smollm") -> None:
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path, hf: Any, pre: str = "smollm", encoding: GGMLQuantizationType = GGMLQuantizationType.F32, **changes: Any
) -> Path:
    """Write a model of Transformers; `changes` are metadata, None removes a key."""
    config = hf.config
    architecture = config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_size))
    if pre != "none":
        add_tokenizer(writer, pre)
    for name, value in {"bos": 1, "eos": 2, "padding": 0}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    writer.add_chat_template(TEMPLATE)
    for key, value in changes.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(writer_architecture(architecture), config.num_hidden_layers)
    for name, parameter in hf.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.numpy()
        if architecture == "llama" and ".q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None
        if encoding != GGMLQuantizationType.F32 and array.ndim == 2:
            writer.add_tensor(stored, gguf.quantize(array, encoding), raw_dtype=encoding)
        else:
            writer.add_tensor(stored, array)
    finish(writer)
    return path


def writer_architecture(name: str) -> gguf.MODEL_ARCH:
    return next(one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def llama3_factors(rope: Mapping[str, Any], head_size: int) -> Array:
    """Return the divisors of frequencies, as convert_hf_to_gguf.py of llama.cpp computes them."""
    factors = []
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    for index in range(0, head_size, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (index / head_size)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def read(folder: Path) -> tuple[Description, dict[str, Array]]:
    """Return the description and all tensors of a folder."""
    opened = Folder(folder)
    model, _ = describe(find_family(opened.config), opened.config, opened.tensors)
    opened.config.check_all_read()
    return model, {name: opened.tensors.read(name) for name in opened.tensors.names}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_model_of_its_safetensors(name: str, tmp_path: Path) -> None:
    hf = random_model(MODELS[name])
    hf.save_pretrained(tmp_path / "original")
    (tmp_path / "converted").mkdir()
    assert convert(write_gguf(tmp_path / "model.gguf", hf), tmp_path / "converted").quantized is None
    (expected, tensors), (given, converted) = read(tmp_path / "original"), read(tmp_path / "converted")
    assert given == expected
    assert converted.keys() == tensors.keys()
    for tensor, array in tensors.items():
        assert_array_equal(converted[tensor], array, err_msg=tensor)


def test_the_tokens_and_the_template_of_a_file(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "model.gguf", random_model(MODELS["llama"])), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE,
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [2]
    (tmp_path / "tools").mkdir()
    for_tools: Any = {"tokenizer.chat_template.tool_use": "x"}
    convert(write_gguf(tmp_path / "tools.gguf", random_model(MODELS["llama"]), **for_tools), tmp_path / "tools")
    named = json.loads((tmp_path / "tools" / "tokenizer_config.json").read_text())["chat_template"]
    assert {one["name"]: one["template"] for one in named} == {"default": TEMPLATE, "tool_use": "x"}


QUANTIZED = [one for one in GGMLQuantizationType if one.name in ("F16", "BF16", "Q4_0", "Q5_1", "Q8_0")]


@pytest.mark.parametrize("encoding", QUANTIZED, ids=lambda one: one.name)
def test_quantized_weights_approximate_the_original(encoding: GGMLQuantizationType, tmp_path: Path) -> None:
    hf = random_model(LlamaConfig(**SIZES | BLOCKS))
    encodings = convert(write_gguf(tmp_path / "model.gguf", hf, encoding=encoding), tmp_path).quantized
    assert encodings == (None if "F16" in encoding.name else f"{encoding.name}, F32")
    _, tensors = read(tmp_path)
    for name, parameter in hf.state_dict().items():
        largest = float(parameter.abs().max())
        assert_allclose(tensors[name], parameter.numpy(), rtol=0, atol=largest / 7, err_msg=name)


def blocks(encoding: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Return the bytes of three rows of two random blocks."""
    _, size = gguf.GGML_QUANT_SIZES[encoding]
    return np.random.default_rng(0).integers(0, 60, (3, 2 * size), np.uint8)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_encodings_without_an_encoder_are_decoded(name: str, tmp_path: Path) -> None:
    encoding = GGMLQuantizationType[name]
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    data = blocks(encoding)
    writer.add_tensor("a", data, raw_dtype=encoding)
    writer.add_tensor("b", np.ones(5, np.float32))
    finish(writer)
    file = GgufFile(tmp_path / "model.gguf")
    assert file.entries["a"].shape == (3, 2 * gguf.GGML_QUANT_SIZES[encoding][0])
    assert_array_equal(file.read("a"), gguf.dequantize(data, encoding))
    assert_array_equal(file.read("b"), np.ones(5, np.float32))


def slow_decode(data: bytes) -> list[float]:
    """Decode Q8_0 one value after the other."""
    values: list[float] = []
    for start in range(0, len(data), 34):
        scale = np.frombuffer(data[start : start + 2], np.float16)[0]
        values += [float(scale) * code for code in np.frombuffer(data[start + 2 : start + 34], np.int8)]
    return values


def test_decoded_values_equal_the_documented_formula() -> None:
    data = blocks(GGMLQuantizationType.Q8_0)
    expected = np.array(slow_decode(data.tobytes()), np.float32)
    assert_array_equal(gguf.dequantize(data, GGMLQuantizationType.Q8_0).ravel(), expected)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["<|im_start|>", "ab", "1", "2", "3", "Ġab", "<tool>"]),
        ("qwen2", ["<|im_start|>", "ab", "1", "2", "3", "Ġab", "<tool>"]),
        ("gpt-2", ["<|im_start|>", "ab", "123", "Ġab", "<tool>"]),
        ("llama-bpe", ["<|im_start|>", "<|im_start|>", "ab", "123", "Ġab", "<tool>"]),
    ],
)
def test_texts_are_split_by_the_pattern_of_the_file(pre: str, expected: Sequence[str], tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "model.gguf", random_model(MODELS["llama"]), pre), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab123 ab<tool>").tokens == expected
    assert tokenizer.decode(tokenizer.encode("ab123 ab").ids) == "ab123 ab"


def test_missing_metadata_are_an_error_or_a_stated_assumption(tmp_path: Path) -> None:
    path, llama = tmp_path / "model.gguf", random_model(MODELS["llama"])
    notes = convert(write_gguf(path, random_model(MODELS["qwen2"]), ""), tmp_path).notes
    assert notes == (
        f"{path} has no tokenizer.ggml.add_bos_token: texts start with the start token if those of its tokenizer "
        "usually do, it is assumed",
        f"{path} has no tokenizer.ggml.pre: texts are split into words as those of qwen2 are, it is assumed",
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("12345 ab").tokens == ["1", "2", "3", "4", "5", "Ġab"]
    (tmp_path / "other").mkdir()
    *_, note = convert(write_gguf(path, llama, "default"), tmp_path / "other").notes
    assert note.endswith("tokenizer.ggml.pre default: texts are split into words as those of GPT-2 are, it is assumed")
    with pytest.raises(ImportFailedError, match=r"no tokenizer.ggml.pre, so that it is not known how texts are split"):
        convert(write_gguf(path, llama, ""), tmp_path)
    (tmp_path / "linear").mkdir()
    path.write_bytes(
        write_gguf(path, random_model(MODELS["llama-linear"]))
        .read_bytes()
        .replace(b"llama.rope.scaling.type", b"general.rope.scaling.ty")
    )
    *_, note = convert(path, tmp_path / "linear").notes
    assert note.endswith("no llama.rope.scaling.type: positions are scaled linearly, it is assumed")
    config = json.loads((tmp_path / "linear" / "config.json").read_text(encoding="utf-8"))
    assert config["rope_parameters"] == {**ROPE, "rope_type": "linear", "factor": 2.0}
    path.write_bytes(write_gguf(path, llama, "llama-bpe").read_bytes().replace(b"bos_", b"box_"))
    with pytest.raises(ImportFailedError, match=r"no tokenizer.ggml.bos_token_id, but its texts start with this token"):
        convert(path, tmp_path)


@pytest.mark.parametrize("padding", [CONTROL, UNUSED])
def test_sentencepiece_tokens_equal_transformers(padding: int, tmp_path: Path) -> None:
    hf = random_model(LlamaConfig(**SIZES | {"vocab_size": 272}))
    words = ["▁", "a", "b", "ab", "▁a", "▁ab", "c", "cab", "▁cab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokens += [f"<pad{index}>" for index in range(272 - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 9, *[padding] * 4]
    scores = [0.0] * 259 + [-7.0, -8.0, -9.0, -1.0, -3.0, -2.0, -10.0, -5.0, -4.0] + [0.0] * 4
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
    }
    path = write_gguf(tmp_path / "model.gguf", hf, "none", **metadata)
    convert(path, tmp_path)
    given = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in ("ab cab", "cab  abc", "é b", "a"):
        assert given.encode(text).ids == expected(text)["input_ids"], text
        assert given.decode(given.encode(text).ids) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    read_table(__file__),
)
def test_other_options_are_errors(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(MODELS["llama"]), **changes)
    with pytest.raises(ImportFailedError, match=message):
        convert(path, tmp_path)


def test_another_tokenizer_or_architecture_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(MODELS["llama"]), "tekken")
    with pytest.raises(ImportFailedError, match=r"tokenizer.ggml.pre is 'tekken', which is not supported"):
        convert(path, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(ImportFailedError, match="has the architecture 'lamma', and supported are llama, qwen2, qwen3"):
        convert(path, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [(b"llama.block_count", "has the key 'llama.block_count' twice"), (b"blk.0.attn_k", "tensors have the same name")],
)
def test_a_name_that_is_there_twice_is_an_error(name: bytes, message: str, tmp_path: Path) -> None:
    other = {b"llama.block_count": b"llama.block_COUNT", b"blk.0.attn_k": b"blk.1.attn_k"}[name]
    changes: dict[str, Any] = {"llama.block_COUNT": 2}
    path = write_gguf(tmp_path / "model.gguf", random_model(MODELS["llama"]), **changes)
    path.write_bytes(path.read_bytes().replace(other, name, 1))
    with pytest.raises(ImportFailedError, match=message):
        GgufFile(path)


def test_other_factors_of_frequencies_are_an_error(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-3.1"])
    hf.config.rope_parameters["original_max_position_embeddings"] = 4000
    with pytest.raises(ImportFailedError, match=r"'rope_freqs.weight' that is not the one of Llama 3\.1"):
        convert(write_gguf(tmp_path / "model.gguf", hf), tmp_path)
    with pytest.raises(ImportFailedError, match=r"'rope_freqs.weight' that is not the one of Llama 3\.1"):
        _llama3_scaling(np.ones(8, np.float32), 10000.0, head_size=2**60)  # as many numbers fit into no memory


def test_a_damaged_file_is_an_error_and_never_read_outside(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(MODELS["llama"]))
    original = path.read_bytes()
    for kept in (0, 3, 10, 100, len(original) // 2, len(original) - 1000):
        path.write_bytes(original[:kept])
        with pytest.raises(ImportFailedError, match=r"is not a supported GGUF file: .*; download it again"):
            GgufFile(path)
    generator = np.random.default_rng(1)
    num_errors = 0
    for _ in range(200):
        changed = bytearray(original)
        for place in generator.integers(0, 1500, 3):
            changed[place] = generator.integers(0, 256)
        path.write_bytes(changed)
        try:
            file = GgufFile(path)
            for name in file.entries:
                file.read(name)
        except ImportFailedError:
            num_errors += 1
    assert num_errors > 20


def test_the_command_line_imports_and_verifies_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoding = GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "model.gguf", random_model(LlamaConfig(**SIZES | BLOCKS)), encoding=encoding)
    assert main([str(path), "--out", str(tmp_path / "bundle"), "--bits", "32"]) == 0
    manifest = read_bundle(tmp_path / "bundle")
    assert manifest.architecture == "LlamaForCausalLM"
    assert manifest.origin is not None
    assert manifest.origin.quantized == "Q8_0, F32"
    assert manifest.origin.files["model.gguf"] == sha256_of(path)
    assert manifest.verification is not None and manifest.verification.max_logit_difference > 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "bundle"), "--checkpoint", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["different_generations"] == 0
    assert manifest.chat is not None and manifest.chat.program == TEMPLATE
    changed = manifest.chat.model_copy(update={"digest": "0" * 64})
    write_manifest(tmp_path / "bundle", manifest.model_copy(update={"chat": changed}))
    assert main(["verify", str(tmp_path / "bundle"), "--checkpoint", str(path)]) == 1
    assert "formats dialogues in another way than the chat template of the checkpoint" in capsys.readouterr().err


def test_parameters_are_random() -> None:
    """A permutation of equal values would show nothing."""
    assert torch.unique(random_model(MODELS["llama"]).model.layers[0].self_attn.q_proj.weight).numel() > 1000
