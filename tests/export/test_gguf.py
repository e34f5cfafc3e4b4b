"""Conversion of a small GGUF file; its tensors are decoded value by value for comparison."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from export.sources.checkpoint import ImportFailedError, open_folder
from export.sources.gguf import ENCODINGS, GgufFile, convert, decode

WIDTH, HEADS, KV_HEADS, INNER = 32, 4, 2, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(40 + index) for index in range(60)), "ab"]


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: Any) -> bytes:
    match item:
        case str():
            return struct.pack("<I", 8) + string(item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
    kind = 8 if isinstance(item[0], str) else 4
    items = b"".join(string(one) if kind == 8 else struct.pack("<I", one) for one in item)
    return struct.pack("<IIQ", 9, kind, len(item)) + items


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 3)],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }};{% endfor %}",
}
MODULES = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}


def tensors() -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """Return the shape, the encoding and random data of each tensor."""
    generator = np.random.default_rng(3)
    shapes = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {f"blk.0.{module}.weight": shape for module, shape in MODULES.items()}
    drawn = {}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = 0 if len(shape) == 1 else (0, 1, 3, 8)[number % 4]
        blocks = int(np.prod(shape)) // ENCODINGS[kind].values
        if kind in (0, 1):
            data = generator.standard_normal(blocks).astype(np.float32 if kind == 0 else np.float16).tobytes()
        else:
            codes = generator.integers(0, 256, (blocks, ENCODINGS[kind].size), np.uint8)
            codes[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            if kind == 3:
                codes[:, 2:4] = np.frombuffer(np.float16(-0.07).tobytes(), np.uint8)
            data = codes.tobytes()
        drawn[name] = (shape, kind, data)
    return drawn


def write_gguf(path: Path, **changes: Any) -> Path:
    metadata = METADATA | changes
    described, body = b"", b""
    for name, (shape, kind, data) in tensors().items():
        described += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        described += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors()), len(metadata))
    header += b"".join(string(key) + value(item) for key, item in metadata.items()) + described
    path.write_bytes(header + bytes(-len(header) % 32) + body)
    return path


def slow_decode(data: bytes, kind: int) -> list[float]:
    """Decode one value after the other."""
    size, values = ENCODINGS[kind].size, []
    for start in range(0, len(data), size):
        block = data[start : start + size]
        if kind == 0:
            values.append(struct.unpack("<f", block)[0])
        elif kind == 1:
            values.append(struct.unpack("<e", block)[0])
        elif kind == 8:
            values += [struct.unpack("<e", block[:2])[0] * code for code in struct.unpack("<32b", block[2:])]
        else:
            scale, least = struct.unpack("<ee", block[:4])
            values += [scale * (byte & 15) + least for byte in block[4:]]
            values += [scale * (byte >> 4) + least for byte in block[4:]]
    return values


def test_a_file_becomes_a_folder_with_the_order_of_hugging_face(tmp_path: Path) -> None:
    assert convert(write_gguf(tmp_path / "model.gguf"), tmp_path) == "F32, Q8_0, F16, Q4_1"
    stored = tensors()
    with open_folder(tmp_path) as folder:
        assert folder.architectures == ("LlamaForCausalLM",) and len(folder.tensors.names) == len(stored)
        assert folder.config.number("rms_norm_eps") == 1e-5 and folder.config.boolean("tie_word_embeddings")
        queries = folder.tensors.read("model.layers.0.self_attn.q_proj.weight")
        down = folder.tensors.read("model.layers.0.mlp.down_proj.weight")
    shape, kind, data = stored["blk.0.ffn_down.weight"]
    # One product and one sum of float32, relative to the largest value.
    np.testing.assert_allclose(down.reshape(-1), slow_decode(data, kind), rtol=0, atol=np.abs(down).max() * 2**-22)
    shape, kind, data = stored["blk.0.attn_q.weight"]
    interleaved = np.array(slow_decode(data, kind), np.float32).reshape(shape)
    size = WIDTH // HEADS
    for head in range(HEADS):
        for index in range(size):
            place = head * size + index % (size // 2) * 2 + index // (size // 2)
            np.testing.assert_allclose(queries[head * size + index], interleaved[place], rtol=2**-22, atol=2**-22)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab1").tokens == ["<|im_start|>", "ab", "1"]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["chat_template"]) == ("<|im_end|>", METADATA["tokenizer.chat_template"])


@pytest.mark.parametrize("kind", ENCODINGS)
def test_each_encoding_is_decoded(kind: int) -> None:
    data = np.frombuffer(np.random.default_rng(0).integers(0, 60, 40 * ENCODINGS[kind].size, np.uint8), np.uint8)
    expected = np.array(slow_decode(data.tobytes(), kind), np.float32)
    tolerance = float(np.abs(expected).max()) * 2**-22
    np.testing.assert_allclose(decode(data, ENCODINGS[kind]), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "is not a SmolLM2 model; import the original safetensors instead"),
        ({"tokenizer.ggml.pre": "qwen2"}, "is not a SmolLM2 model"),
        ({"llama.block_count": "one"}, "has no valid llama.block_count"),
    ],
)
def test_another_model_is_an_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ImportFailedError, match=message):
        convert(write_gguf(tmp_path / "model.gguf", **changes), tmp_path)


def test_a_damaged_file_is_an_error_and_never_read_outside(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
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
            for name in (file := GgufFile(path)).entries:
                file.read(name)
        except ImportFailedError:
            num_errors += 1
    assert num_errors > 20
