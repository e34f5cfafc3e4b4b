"""Conversion of a GGUF file of llama.cpp to a folder in the layout of Hugging Face.

The package `gguf` decodes the weights, which are often quantized, so that the result approximates
the original model. This module reads the header itself: the reader of the package follows lengths
beyond the end of a damaged file. The format is documented at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from sightline.base.bundle_files import sha256_of
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Provenance
from sightline.export.tokenizers import QWEN_WORDS
from sightline.export.tokenizers.sentencepiece import Piece, PieceKind, SentencePieceModel, convert_sentencepiece
from sightline.export.tokenizers.vocabulary import convert_byte_level

Floats = NDArray[np.float32]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_DIMENSIONS = 4
# Encodings that are not called quantized.
FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file."""

    shape: tuple[int, ...]
    encoding: GGMLQuantizationType
    offset: int  # in bytes from the beginning of the file

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored bytes."""
        values, size = GGML_QUANT_SIZES[self.encoding]
        return (*self.shape[:-1], self.shape[-1] // values * size)


def _encoding(number: int) -> GGMLQuantizationType | None:
    """Return the encoding with a number, None if the package cannot decode it."""
    try:
        encoding = GGMLQuantizationType(number)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[encoding][1]), np.uint8), encoding)
    except (ValueError, NotImplementedError):
        return None
    return encoding


class GgufFile:
    """Metadata and tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            try:
                self.metadata, self.entries = self._read_header(file)
            except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
                raise self._invalid("its header is truncated or damaged") from None
        for name, entry in self.entries.items():
            if entry.offset + math.prod(entry.stored_shape) > self._size:
                raise self._invalid(f"it ends before the data of {name}")

    def _invalid(self, reason: str) -> ImportFailedError:
        return ImportFailedError(f"{self._path} is not a supported GGUF file: {reason}; download it again")

    def _read_header(self, file: BufferedReader) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if file.read(4) != b"GGUF":
            raise self._invalid("it does not begin with GGUF")
        version, num_tensors, num_keys = self._unpack(file, "<IQQ")
        if version not in (2, 3):
            raise self._invalid(f"its version is {version}, and supported are 2 and 3")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string(file)
            if key in metadata:
                raise self._invalid(f"its header has the key {key[:40]!r} twice")
            metadata[key] = self._value(file, *self._unpack(file, "<I"))
        entries, encodings = dict[str, GgufTensor](), dict[int, GGMLQuantizationType | None]()
        for _ in range(num_tensors):
            name = self._string(file)
            (num_dimensions,) = self._unpack(file, "<I")
            if num_dimensions > MAX_DIMENSIONS:
                raise self._invalid(f"{name} has {num_dimensions} dimensions")
            # The first dimension is the innermost.
            shape = tuple(reversed(self._unpack(file, f"<{num_dimensions}Q")))
            kind, offset = self._unpack(file, "<IQ")
            if kind not in encodings:
                encodings[kind] = _encoding(kind)
            encoding = encodings[kind]
            if encoding is None:
                raise self._invalid(f"{name} has the encoding {kind}, which the package gguf does not decode")
            if not shape or 0 in shape or shape[-1] % GGML_QUANT_SIZES[encoding][0]:
                raise self._invalid(f"the rows of {name} are not whole blocks of {GGML_QUANT_SIZES[encoding][0]}")
            if name in entries:
                raise self._invalid("two of its tensors have the same name")
            entries[name] = GgufTensor(shape, encoding, offset)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._invalid(f"general.alignment must be an integer of at least 1, got {str(alignment)[:40]!r}")
        start = -(-file.tell() // alignment) * alignment
        return metadata, {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}

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

    def read(self, name: str) -> Floats:
        """Read a tensor and convert it to float32."""
        entry = self.entries[name]
        data = np.fromfile(self._path, np.uint8, math.prod(entry.stored_shape), offset=entry.offset)
        return np.asarray(dequantize(data.reshape(entry.stored_shape), entry.encoding), np.float32)


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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_FACTORS = "rope_freqs.weight"


# Keys that older converters and other programs leave out, and what is assumed then.
_ASSUMED = {
    "{}.rope.freq_base": "the base of its rotary embedding is 10000",
    "tokenizer.ggml.token_type": "none of its tokens is special",
    "tokenizer.ggml.add_bos_token": "texts start with the start token if those of its tokenizer usually do",
}
_PATTERN = "tokenizer.ggml.pre"  # name of the pattern that splits a text into words


def convert(source: Path, folder: Path) -> Provenance:
    """Convert a GGUF file to a folder with safetensors, configuration and tokenizer.

    Returns:
        The encodings of the weights, such as "Q4_1, Q8_0, F32" or None if no weight is quantized,
        the hash of the file, and notes about metadata that are missing.
    """
    gguf = GgufFile(source)
    settings = Config(gguf.metadata, str(source))
    architecture = settings.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ImportFailedError(
            f"{source} has the architecture {architecture[:40]!r}, and supported are {', '.join(_ARCHITECTURES)}; "
            "import the original safetensors instead"
        )
    if settings.integer("split.count", 1) > 1:
        raise ImportFailedError(f"{source} is one of several parts; merge them with `llama-gguf-split --merge` first")
    names = {_module_name(name, source): name for name in gguf.entries if name != _ROPE_FACTORS}
    config = _configuration(settings, architecture, gguf)
    tokens, kinds = _tokens(settings, source)
    described = {
        f"{name}_token": tokens[config[f"{name}_token_id"]]
        for name in ("bos", "pad")
        if config.get(f"{name}_token_id") in range(len(tokens))
    }
    template = settings.text("tokenizer.chat_template", "")
    tokenizer = _tokenizer(settings, tokens, kinds, config, source)
    assumed = {key.format(architecture): text for key, text in _ASSUMED.items()}
    if settings.text("tokenizer.ggml.model") == "gpt2":
        assumed |= {_PATTERN: f"texts are split into words as those of {architecture} are"}
    if f"{architecture}.rope.scaling.factor" in settings:
        assumed[f"{architecture}.rope.scaling.type"] = "positions are scaled linearly"
    notes = [f"{source} has no {key}: {text}, it is assumed" for key, text in assumed.items() if key not in settings]
    if _PATTERN in assumed and settings.get(_PATTERN, "") == "default":
        notes.append(
            f"{source} has the {_PATTERN} default: texts are split into words as those of GPT-2 are, it is assumed"
        )
    settings.ignore("general.*", "tokenizer.*", "quantize.*", "split.*", f"{architecture}.vocab_size")
    settings.check_all_read()
    ends = config["eos_token_id"]
    described |= {"eos_token": tokens[ends[0]]} if ends and ends[0] in range(len(tokens)) else {}
    tool_template = settings.text("tokenizer.chat_template.tool_use", "")
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": tool_template}]
    described |= {"chat_template": named if tool_template else template} if template else {}
    is_llama = architecture == "llama"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]} if is_llama else {}
    _write_safetensors(folder / "model.safetensors", gguf, names, heads)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", described)
    tokenizer.save(str(folder / "tokenizer.json"))
    used = dict.fromkeys(entry.encoding for entry in gguf.entries.values())
    is_quantized = any(encoding not in FLOATS for encoding in used)
    encodings = ", ".join(encoding.name for encoding in used) if is_quantized else None
    return Provenance(quantized=encodings, files={source.name: sha256_of(source)}, notes=tuple(notes))


def _configuration(settings: Config, architecture: str, gguf: GgufFile) -> dict[str, Any]:
    """Return config.json."""
    heads = settings.integer(f"{architecture}.attention.head_count", least=1)
    width = settings.integer(f"{architecture}.embedding_length")
    head_size = settings.integer(f"{architecture}.attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        settings.neutral(f"{architecture}.{key}", head_size)
    if "token_embd.weight" not in gguf.entries:
        raise ImportFailedError("the GGUF file has no tensor 'token_embd.weight', which its architecture needs")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": width,
        "intermediate_size": settings.integer(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": settings.integer(f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer(f"{architecture}.attention.head_count_kv", heads, least=1),
        "head_dim": head_size,
        "vocab_size": gguf.entries["token_embd.weight"].shape[0],
        "max_position_embeddings": settings.integer(f"{architecture}.context_length"),
        # The file has it as float32.
        "rms_norm_eps": float(f"{settings.number(f'{architecture}.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in gguf.entries,
        "rope_parameters": _rope(settings, architecture, gguf, head_size),
    }
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.entries
    if architecture in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.entries
    for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{name}_token_id" in settings:
            config[key] = settings.integer(f"tokenizer.ggml.{name}_token_id")
    ends = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(settings.integer(key) for key in ends if key in settings))
    return config


def _rope(settings: Config, architecture: str, gguf: GgufFile, head_size: int) -> dict[str, Any]:
    """Return the options of rotary embedding."""
    start = f"{architecture}.rope"
    base = settings.number(f"{start}.freq_base", 10000.0, above=1)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    # Without a type, llama.cpp scales linearly.
    kind = settings.text(f"{start}.scaling.type", "linear" if f"{start}.scaling.factor" in settings else "none")
    settings.ignore(f"{start}.scaling.finetuned")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": settings.number(f"{start}.scaling.factor")}
        if kind == "yarn":
            key = f"{start}.scaling.original_context_length"
            rope["original_max_position_embeddings"] = settings.integer(key, least=1)
    elif kind == "none":
        settings.ignore(f"{start}.scaling.factor", f"{start}.scaling.original_context_length")
    else:
        raise ImportFailedError(
            f"the GGUF file has the rope scaling {kind[:40]!r}; supported are none, linear and yarn"
        )
    if _ROPE_FACTORS in gguf.entries:
        if kind != "none":
            raise ImportFailedError(f"the GGUF file has both {_ROPE_FACTORS} and {start}.scaling.type {kind!r}")
        rope |= _llama3_scaling(gguf.read(_ROPE_FACTORS), base, head_size)
    return rope


def _llama3_scaling(factors: Floats, base: float, head_size: int) -> dict[str, Any]:
    """Return the options of Llama 3.1 that give these divisors of the frequencies.

    They have the limits that all models of this kind have.
    """
    largest, low, high = float(factors.max()), 1.0, 4.0
    # A size of heads that is not that of the tensor may be too large for the memory.
    originals = [2**power for power in range(10, 18)] if factors.shape == (head_size // 2,) else []
    for original in originals:
        frequencies = base ** (-2 * np.arange(head_size // 2) / head_size)
        share = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
        if np.allclose(factors, 1 / ((1 - share) / largest + share), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ImportFailedError(
        f"the GGUF file has a tensor {_ROPE_FACTORS!r} that is not the one of Llama 3.1; import the original "
        "safetensors instead"
    )


def _module_name(name: str, source: Path) -> str:
    """Return the name that Hugging Face uses for a tensor."""
    match name.split("."):
        case [module, "weight"] if module in _MODULES:
            return f"{_MODULES[module]}.weight"
        case ["blk", layer, module, "weight" | "bias" as kind] if layer.isdecimal() and module in _LAYER_MODULES:
            return f"model.layers.{layer}.{_LAYER_MODULES[module]}.{kind}"
    raise ImportFailedError(f"{source} has the unknown tensor {name}; import the original safetensors instead")


def _write_safetensors(path: Path, gguf: GgufFile, names: Mapping[str, str], heads: Mapping[str, int]) -> None:
    """Write tensors one at a time as float32.

    Args:
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
        for name, stored in names.items():
            array, count = gguf.read(stored), heads.get(name.split(".")[-2])
            if count is not None:
                # GGUF interleaves the two halves of each head, whose dimensions rotate in pairs.
                if len(array) % (2 * count):
                    raise ImportFailedError(
                        f"the GGUF file has {len(array)} rows in {stored!r}, which {count} heads cannot share"
                    )
                pairs = array.reshape(count, -1, 2, *array.shape[1:])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
            file.write(np.ascontiguousarray(array, np.float32).data)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokens(settings: Config, source: Path) -> tuple[list[str], list[int]]:
    """Return the tokens and their kinds."""
    tokens, kinds = settings.get("tokenizer.ggml.tokens"), settings.get("tokenizer.ggml.token_type", None) or []
    if (
        not isinstance(tokens, list)
        or not all(isinstance(token, str) for token in tokens)
        or len(set(tokens)) < len(tokens)
        or not isinstance(kinds, list)
        or len(kinds) not in (0, len(tokens))
        or not set(kinds) <= set(PieceKind)
    ):
        raise ImportFailedError(
            f"{source}: tokenizer.ggml.tokens must be different strings, and tokenizer.ggml.token_type a number from 1 "
            "to 6 for each; download it again"
        )
    return tokens, kinds or [PieceKind.NORMAL] * len(tokens)


def _tokenizer(
    settings: Config, tokens: list[str], kinds: list[int], config: Mapping[str, Any], source: Path
) -> Tokenizer:
    model = settings.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ImportFailedError(
            f"{source} has the tokenizer {model[:40]!r}, and supported are gpt2 and llama; import the original "
            "safetensors instead"
        )
    # All models of Qwen 2 and 3 have the same pattern, those of Llama have several.
    pattern = settings.text(_PATTERN, "qwen2" if config["model_type"].startswith("qwen") else "")
    try:
        tokenizer = (
            _sentencepiece(settings, tokens, kinds)
            if model == "llama"
            else _byte_level(tokens, kinds, settings.get("tokenizer.ggml.merges"), pattern)
        )
    except ImportFailedError as error:
        raise ImportFailedError(f"{source}: {error}") from None
    except Exception as error:  # the library raises plain exceptions
        raise ImportFailedError(f"the tokenizer of {source} is damaged: {error}; download it again") from None
    has_start = settings.boolean("tokenizer.ggml.add_bos_token", model == "llama" or pattern in _LLAMA3_PATTERNS)
    if has_start and "bos_token_id" not in config:
        raise ImportFailedError(
            f"{source} has no tokenizer.ggml.bos_token_id, but its texts start with this token; import the original "
            "safetensors instead"
        )
    has_end = settings.boolean("tokenizer.ggml.add_eos_token", False)
    starts = [config["bos_token_id"]] if has_start else []
    ends = config["eos_token_id"][:1] if has_end else []
    special = {tokens[id_]: id_ for id_ in (*starts, *ends) if id_ in range(len(tokens))}
    if special:
        start, end = ([token for token, id_ in special.items() if id_ in ids] for ids in (starts, ends))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*start, "$A", *end],
            pair=[*start, "$A", *end, *start, "$B", *end],
            special_tokens=list(special.items()),
        )
    return tokenizer


def _sentencepiece(settings: Config, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Return the tokenizer of Llama 2 and Mistral."""
    scores = settings.get("tokenizer.ggml.scores")
    pieces = [Piece(*fields) for fields in zip(tokens, scores, map(PieceKind, kinds), strict=True)]
    return convert_sentencepiece(
        SentencePieceModel(
            tuple(pieces),
            is_bpe=True,
            byte_fallback=PieceKind.BYTE in kinds,
            add_dummy_prefix=settings.boolean("tokenizer.ggml.add_space_prefix", True),
            remove_extra_whitespaces=settings.boolean("tokenizer.ggml.remove_extra_whitespaces", False),
        )
    )


LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERNS = ("llama-bpe", "llama3", "llama-v3")
_QWEN_PATTERNS = ("qwen2", "deepseek-r1-qwen")
_GPT2_PATTERNS = ("gpt-2", "default")


def _byte_level(tokens: list[str], kinds: list[int], merges: list[str], pattern: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits texts into words by a named pattern."""
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == PieceKind.CONTROL]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    words = QWEN_WORDS if pattern in _QWEN_PATTERNS else LLAMA3_WORDS if pattern in _LLAMA3_PATTERNS else None
    tokenizer = convert_byte_level(ids, "\n".join(merges), special, words=words)
    if pattern == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif words is None and pattern not in _GPT2_PATTERNS:
        supported = ("smollm", *_QWEN_PATTERNS, *_LLAMA3_PATTERNS, *_GPT2_PATTERNS)
        problem = f"{_PATTERN} is {pattern[:40]!r}, which is not supported"
        if not pattern:
            problem = f"it has no {_PATTERN}, so that it is not known how texts are split into words"
        raise ImportFailedError(
            f"{problem}; supported are {', '.join(supported)}: import the original safetensors instead"
        )
    symbols = [token for token, kind in zip(tokens, kinds, strict=True) if kind == PieceKind.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(symbol, special=False, normalized=False) for symbol in symbols])
    if pattern not in _LLAMA3_PATTERNS:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    content["normalizer"], content["model"]["ignore_merges"] = None, True
    return Tokenizer.from_str(json.dumps(content))
