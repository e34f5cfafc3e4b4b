"""Conversion of a GGUF file of the Llama architecture to a folder in the layout of Hugging Face.

The catalogue uses it for a model whose package has only this format. Such weights were quantized,
so that the result approximates the original model. The format is documented at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from export.sources.checkpoint import ImportFailedError

Floats = NDArray[np.float32]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL = 3  # type of special tokens
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class Encoding:
    """Storage of weights in blocks."""

    name: str
    values: int  # in a block
    size: int  # bytes of a block


ENCODINGS = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    3: Encoding("Q4_1", 32, 20),
    8: Encoding("Q8_0", 32, 34),
}


@dataclass(frozen=True)
class Entry:
    """A tensor in a GGUF file."""

    shape: tuple[int, ...]
    encoding: Encoding
    offset: int  # in bytes from the beginning of the file


class GgufFile:
    """Metadata and tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ImportFailedError: it is not a GGUF file, is truncated, or has an unsupported encoding.
        """
        self._path = path
        with path.open("rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            try:
                self.metadata, self.entries = self._read_header(file)
            except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
                raise self._invalid("its header is truncated or damaged") from None
        for name, entry in self.entries.items():
            if entry.offset + self._num_bytes(entry) > self._size:
                raise self._invalid(f"it ends before the data of {name}")

    def _invalid(self, reason: str) -> ImportFailedError:
        return ImportFailedError(f"{self._path} is not a supported GGUF file: {reason}; download it again")

    def _read_header(self, file: BufferedReader) -> tuple[dict[str, Any], dict[str, Entry]]:
        if file.read(4) != b"GGUF":
            raise self._invalid("it does not begin with GGUF")
        version, num_tensors, num_keys = self._unpack(file, "<IQQ")
        if version not in (2, 3):
            raise self._invalid(f"its version is {version}, and supported are 2 and 3")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string(file)
            metadata[key] = self._value(file, *self._unpack(file, "<I"))
        described = []
        for _ in range(num_tensors):
            name = self._string(file)
            (num_dimensions,) = self._unpack(file, "<I")
            if num_dimensions > MAX_DIMENSIONS:
                raise self._invalid(f"{name} has {num_dimensions} dimensions")
            # The first dimension is the innermost.
            shape = tuple(reversed(self._unpack(file, f"<{num_dimensions}Q")))
            kind, offset = self._unpack(file, "<IQ")
            if kind not in ENCODINGS:
                supported = ", ".join(encoding.name for encoding in ENCODINGS.values())
                raise self._invalid(f"{name} has the encoding {kind}, and supported are {supported}")
            encoding = ENCODINGS[kind]
            if not shape or shape[-1] % encoding.values:
                raise self._invalid(f"the rows of {name} are not whole blocks of {encoding.values}")
            described.append((name, Entry(shape, encoding, offset)))
        alignment = metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
        return metadata, {name: Entry(one.shape, one.encoding, start + one.offset) for name, one in described}

    def _unpack(self, file: BufferedReader, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, file.read(struct.calcsize(layout)))

    def _string(self, file: BufferedReader) -> str:
        (length,) = self._unpack(file, "<Q")
        if length > self._size:
            raise self._invalid("a string is longer than the file")
        data = file.read(length)
        if len(data) < length:
            raise self._invalid("its header is truncated")
        return data.decode()

    def _value(self, file: BufferedReader, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string(file)
        if kind == _ARRAY and depth == 0:
            item, length = self._unpack(file, "<IQ")
            if length > self._size:
                raise self._invalid("an array is longer than the file")
            return [self._value(file, item, depth + 1) for _ in range(length)]
        if kind not in _SCALARS:
            raise self._invalid(f"a value has the unknown type {kind}")
        return self._unpack(file, f"<{_SCALARS[kind]}")[0]

    @staticmethod
    def _num_bytes(entry: Entry) -> int:
        return math.prod(entry.shape) // entry.encoding.values * entry.encoding.size

    def read(self, name: str) -> Floats:
        """Read a tensor and convert it to float32."""
        entry = self.entries[name]
        data = np.fromfile(self._path, np.uint8, self._num_bytes(entry), offset=entry.offset)
        return decode(data, entry.encoding).reshape(entry.shape)


def decode(data: NDArray[np.uint8], encoding: Encoding) -> Floats:
    """Convert stored blocks to float32."""
    if encoding.name == "F32":
        return data.view(np.float32)
    if encoding.name == "F16":
        return data.view(np.float16).astype(np.float32)
    blocks = data.reshape(-1, encoding.size)
    scale = _float16(blocks[:, :2])
    if encoding.name == "Q8_0":  # a scale and 32 signed codes
        codes = blocks[:, 2:].copy().view(np.int8)
        return np.asarray(scale * codes, np.float32).reshape(-1)
    packed = blocks[:, 4:]  # Q4_1: a scale, a minimum, 16 low half bytes, 16 high half bytes
    values = np.concatenate([packed & 15, packed >> 4], axis=1)
    return np.asarray(scale * values + _float16(blocks[:, 2:4]), np.float32).reshape(-1)


def _float16(data: NDArray[np.uint8]) -> Floats:
    return data.copy().view(np.float16).astype(np.float32)


# Modules of a layer, in GGUF and in Hugging Face.
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, folder: Path) -> str:
    """Convert a GGUF file to a folder with safetensors, configuration and tokenizer.

    Returns:
        The encodings of the weights, such as "Q4_1, Q8_0, F32".

    Raises:
        ImportFailedError: the file is damaged, or its architecture, tokenizer or encoding is not
            supported.
    """
    gguf = GgufFile(source)
    settings = _Settings(gguf.metadata, source)
    if settings.text("general.architecture") != "llama" or settings.text("tokenizer.ggml.pre") != "smollm":
        raise ImportFailedError(f"{source} is not a SmolLM2 model; import the original safetensors instead")
    heads, kv_heads = settings.integer("llama.attention.head_count"), settings.integer("llama.attention.head_count_kv")
    names = {_module_name(name, source): name for name in gguf.entries}
    _write_safetensors(folder / "model.safetensors", gguf, names, {"q_proj": heads, "k_proj": kv_heads})
    tokens = settings.values("tokenizer.ggml.tokens")
    ids = {name: settings.integer(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": settings.integer("llama.embedding_length"),
        "intermediate_size": settings.integer("llama.feed_forward_length"),
        "num_hidden_layers": settings.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": len(tokens),
        "max_position_embeddings": settings.integer("llama.context_length"),
        "rope_theta": settings.number("llama.rope.freq_base"),
        # The file has it as float32.
        "rms_norm_eps": float(f"{settings.number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.entries,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["padding"],
    }
    _write_json(folder / "config.json", config)
    described = {
        f"{name}_token": tokens[ids[key]] for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    _write_json(
        folder / "tokenizer_config.json", described | {"chat_template": settings.text("tokenizer.chat_template")}
    )
    _tokenizer(settings, tokens).save(str(folder / "tokenizer.json"))
    return ", ".join(dict.fromkeys(entry.encoding.name for entry in gguf.entries.values()))


class _Settings:
    """Metadata with checked types."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values, self._path = values, path

    def _get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        value = self._values.get(key)
        if not isinstance(value, kind):
            raise ImportFailedError(f"{self._path} has no valid {key}, which its conversion needs; download it again")
        return value

    def integer(self, key: str) -> int:
        value: int = self._get(key, int)
        return value

    def number(self, key: str) -> float:
        return float(self._get(key, (int, float)))

    def text(self, key: str) -> str:
        value: str = self._get(key, str)
        return value

    def values(self, key: str) -> list[Any]:
        value: list[Any] = self._get(key, list)
        return value


def _module_name(name: str, source: Path) -> str:
    """Return the name that Hugging Face uses for a tensor."""
    match name.split("."):
        case [module, "weight"] if module in _MODULES:
            return f"{_MODULES[module]}.weight"
        case ["blk", layer, module, "weight"] if layer.isdecimal() and module in _LAYER_MODULES:
            return f"model.layers.{layer}.{_LAYER_MODULES[module]}.weight"
    raise ImportFailedError(f"{source} has the unknown tensor {name}; import the original safetensors instead")


def _write_safetensors(path: Path, gguf: GgufFile, names: Mapping[str, str], heads: Mapping[str, int]) -> None:
    """Write tensors one at a time as float32.

    Args:
        path: file to write.
        gguf: the source.
        names: names in `gguf` by the names to write.
        heads: number of heads of the projections whose rows GGUF stores in another order.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, stored in names.items():
        shape = gguf.entries[stored].shape
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in _converted(gguf, names, heads):
            file.write(data)


def _converted(gguf: GgufFile, names: Mapping[str, str], heads: Mapping[str, int]) -> Iterator[memoryview]:
    for name, stored in names.items():
        array = gguf.read(stored)
        projection = name.split(".")[-2]
        if projection in heads:
            # GGUF interleaves the two halves of each head, whose dimensions rotate in pairs.
            pairs = array.reshape(heads[projection], -1, 2, array.shape[-1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        yield np.ascontiguousarray(array, np.float32).data


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer(settings: _Settings, tokens: list[str]) -> Tokenizer:
    """Return the byte-level BPE tokenizer of SmolLM2, which splits numbers into digits."""
    merges = [tuple(merge.split(" ")) for merge in settings.values("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises plain exceptions
        raise ImportFailedError(f"the tokenizer of the GGUF file is damaged: {error}; download it again") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = settings.values("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
