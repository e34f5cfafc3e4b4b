"""Weights that GPTQ or AWQ quantized, decoded to float32 without an error (docs/adr/0043).

A weight is (code - zero) * scale. The scale and the zero point belong to a group of inputs of one
output. Codes and zero points are integers of a few bits that share words of 32 bits:

- GPTQ: a word of `qweight` (K * bits / 32, N) has codes of successive inputs of one output, the
  first in its lowest bits. `qzeros` (G, N * bits / 32) has zero points of successive outputs, less
  1 in the first version of the format. `g_idx` (K,) is the group of each input.
- AWQ: a word of `qweight` (K, N / 8) has the codes of eight outputs for one input, in the order 0,
  2, 4, 6, 1, 3, 5, 7. `qzeros` (G, N / 8) has the same order.

Both have `scales` (G, N). Other tensors, such as embeddings, are stored as usual.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, StoredTensor, Tensors

WORD_BITS = 32
GPTQ_BITS, AWQ_BITS = (2, 4, 8), 4
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight outputs
PACKED = ("qweight", "qzeros", "scales", "g_idx")

Integers = NDArray[np.signedinteger[Any]]

# Keys of quantization_config that describe how the weights were computed, or choose a kernel.
_HARMLESS = (
    "quant_method", "sym", "damp_*", "true_sequential", "static_groups", "mse", "meta", "dataset", "tokenizer",
    "batch_size", "model_name_or_path", "model_file_base_name", "model_seqlen", "modules_in_block_to_quantize",
    "modules_to_not_convert", "module_name_preceding_first_block", "block_name_to_quantize", "pad_token_id",
    "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "cache_block_outputs", "use_cuda_fp16",
    "quantizer", "lm_head", "fuse_max_seq_len", "do_fuse", "modules_to_fuse",
)  # fmt: skip


@dataclass(frozen=True)
class PackedFormat:
    """Format of quantized weights."""

    method: str  # "GPTQ" or "AWQ"
    bits: int
    group_size: int  # inputs of a group; -1: all inputs
    zero_offset: int = 0  # is added to each stored zero point
    has_order: bool = False  # the groups of GPTQ have other inputs than successive ones

    def __str__(self) -> str:
        return f"{self.method}, {self.bits} bits"


def packed_format(config: Config) -> PackedFormat | None:
    """Return the format of quantized weights, None for others; an unsupported one is an error."""
    options = config.section("quantization_config")
    if options is None:
        return None
    method, bits = options.get("quant_method", None) or "an unnamed format", options.get("bits", None)
    version = options.get("version", "gemm") if method == "awq" else None
    is_gptq = method == "gptq" and bits in GPTQ_BITS
    is_awq = method == "awq" and bits == AWQ_BITS and str(version).lower() == "gemm"
    if not (is_gptq or is_awq) or config.get("model_type", None) == "gpt2":  # which stores matrices transposed
        details = [str(method)[:40], *([f"{bits} bits"] if isinstance(bits, int) else [])]
        details += [] if version is None else [f"version {str(version)[:40]}"]
        raise ImportFailedError(
            f"config.json: quantization_config says that the weights are quantized ({', '.join(details)}), which is "
            "not supported; supported are gptq with 2, 4 or 8 bits and awq of version gemm, except of GPT-2: import "
            "the repository with the unquantized weights, and choose --bits 8"
        )
    options.ignore(*_HARMLESS)
    group_size = options.integer("group_size", 128, least=-1)
    if group_size == 0:
        raise ImportFailedError("config.json: quantization_config: group_size must be -1 or at least 1, got 0")
    if is_awq:
        options.neutral("zero_point", True)
        options.neutral("backend", None, "autoawq")
        return PackedFormat("AWQ", AWQ_BITS, group_size)
    options.neutral("is_marlin_format", False)
    options.neutral("dynamic", None, {})
    options.neutral("pack_dtype", None, "int32")
    formats = ("gptq", "gptq_v2")
    options.neutral("format", None, *formats)
    options.neutral("checkpoint_format", None, *formats)
    is_second = "gptq_v2" in (options.get("checkpoint_format", None), options.get("format", None))
    has_order = options.boolean("desc_act", False)
    return PackedFormat("GPTQ", options.integer("bits"), group_size, int(not is_second), has_order)


def unpacked(config: Config, tensors: Tensors) -> Tensors:
    """Return a view of the tensors in which quantized matrices are float32.

    Some programs give each quantized matrix a bias, which is zero. The view names those.
    """
    packing = packed_format(config)
    if packing is None:
        return tensors
    modules = sorted(name.removesuffix(".qweight") for name in tensors.names if name.endswith(".qweight"))
    if not modules:
        raise ImportFailedError(
            f"config.json: quantization_config says that the weights are quantized ({packing}), but no tensor is; "
            "remove quantization_config if the weights are not quantized"
        )
    packed = {f"{module}.{suffix}" for module in modules for suffix in PACKED}
    stored = {name: StoredTensor(tensors.shape(name), partial(tensors.read, name)) for name in tensors.names - packed}
    for module in modules:
        if f"{module}.weight" in tensors:
            raise ImportFailedError(f"the checkpoint has both {module}.weight and {module}.qweight; download it again")
        matrix = _Matrix(packing, tensors, module)
        stored[f"{module}.weight"] = StoredTensor(matrix.shape, matrix.read)
    view = Tensors(stored)
    biases = {f"{module}.bias" for module in modules} & tensors.names
    view.zeros = frozenset(name for name in biases if not tensors.read(name).any())
    return view


class _Matrix:
    """A quantized matrix (N, K). The shapes of its tensors have been checked."""

    def __init__(self, packing: PackedFormat, tensors: Tensors, module: str) -> None:
        self._packing, self._tensors, self._module = packing, tensors, module
        per_word = WORD_BITS // packing.bits
        rows, columns = self._shape("qweight", 2)
        is_awq = packing.method == "AWQ"
        self.shape = (columns * per_word, rows) if is_awq else (columns, rows * per_word)
        outputs, inputs = self.shape
        self._group_size = inputs if packing.group_size == -1 else packing.group_size
        groups = -(-inputs // max(1, self._group_size))
        expected: Mapping[str, tuple[int, ...]] = {
            "qzeros": (groups, outputs // per_word), "scales": (groups, outputs), "g_idx": (inputs,)
        }  # fmt: skip
        self._has_groups = not is_awq and f"{module}.g_idx" in tensors
        for name in expected if self._has_groups else ("qzeros", "scales"):
            if (shape := self._shape(name, len(expected[name]))) != expected[name] or outputs % per_word:
                raise ImportFailedError(
                    f"the tensor '{module}.{name}' has the shape {list(shape)}, but {module}.qweight and group_size "
                    f"{packing.group_size} imply {list(expected[name])}; quantization_config may belong to another "
                    "checkpoint"
                )

    def _shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        shape = self._tensors.shape(f"{self._module}.{name}")
        if len(shape) != dimensions:
            raise ImportFailedError(
                f"the tensor '{self._module}.{name}' must have {dimensions} axes, got {list(shape)}"
            )
        return shape

    def read(self) -> NDArray[np.float32]:
        packing = self._packing
        zeros = self._unpack("qzeros", axis=1)
        if packing.zero_offset and (zeros == (1 << packing.bits) - 1).any():
            raise ImportFailedError(
                f"{self._module}.qzeros has a zero point of {1 << packing.bits}, of which programs that read GPTQ make "
                f"{1 << packing.bits} or 0; import the repository with the unquantized weights"
            )
        groups = self._groups()
        scales = self._tensors.read(f"{self._module}.scales")
        codes = self._unpack("qweight", axis=1 if packing.method == "AWQ" else 0)
        steps = codes - (zeros + packing.zero_offset)[groups]  # (K, N)
        return np.ascontiguousarray((steps.astype(np.float32) * scales[groups]).T)

    def _unpack(self, name: str, axis: int) -> Integers:
        """Return the integers of a tensor whose words have several of them along an axis."""
        bits = self._packing.bits
        words = self._tensors.integers(f"{self._module}.{name}")
        places = AWQ_PLACES if self._packing.method == "AWQ" else range(WORD_BITS // bits)
        parts = [(words >> (bits * place) & ((1 << bits) - 1)).astype(np.int16) for place in places]
        shape = [size * (len(parts) if number == axis else 1) for number, size in enumerate(words.shape)]
        return np.stack(parts, axis=axis + 1).reshape(shape)

    def _groups(self) -> Integers:
        """Return the group of each input."""
        ordered = np.arange(self.shape[1]) // self._group_size
        if not self._has_groups:
            return ordered
        groups = self._tensors.integers(f"{self._module}.g_idx").astype(np.int64)
        if not self._packing.has_order and not groups.any():  # it was never filled in
            return ordered
        is_valid = (groups >= 0).all() and (groups <= ordered[-1]).all()
        if not is_valid or (not self._packing.has_order and (groups != ordered).any()):
            raise ImportFailedError(
                f"{self._module}.g_idx gives inputs other groups than quantization_config, whose desc_act is "
                f"{str(self._packing.has_order).lower()}; quantization_config may belong to another checkpoint"
            )
        return groups
