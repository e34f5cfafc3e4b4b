"""Checkpoints of transformers whose linear layers are quantized in the formats of GPTQ and AWQ."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Integers = NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs from the lowest to the highest bits of a word


@dataclass(frozen=True)
class Packing:
    """Options of a format."""

    options: dict[str, Any]  # `quantization_config`
    is_symmetric: bool = False  # the zero point is the middle of the codes
    has_zero_biases: bool = False  # each matrix without a bias gets one
    fills_groups: bool = True  # write `g_idx`; False: only zeros

    @property
    def bits(self) -> int:
        return int(self.options["bits"])


def quantize(hf: Any, folder: Path, packing: Packing) -> None:
    """Round the linear layers of a model to codes, and save them as codes."""
    linear = {name: one for name, one in hf.named_modules() if isinstance(one, torch.nn.Linear)}
    linear = {name: one for name, one in linear.items() if one is not hf.get_output_embeddings()}
    packed: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(3)
    for name, module in linear.items():
        outputs, inputs = module.weight.shape
        size = packing.options["group_size"]
        size = inputs if size == -1 else size
        groups = np.arange(inputs) // size
        if packing.options.get("desc_act"):
            groups = rng.permutation(groups)
        count, top = int(groups.max()) + 1, 1 << packing.bits
        codes = rng.integers(0, top, (inputs, outputs))
        zeros = np.full((count, outputs), top // 2) if packing.is_symmetric else rng.integers(1, top, (count, outputs))
        scales = rng.uniform(0.5, 2, (count, outputs)).astype(np.float16) / np.float16(top)
        weight = (codes - zeros[groups]).astype(np.float32) * scales.astype(np.float32)[groups]
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(weight.T))
        words = pack_awq if packing.options["quant_method"] == "awq" else pack_gptq
        packed |= words(name, codes, zeros, groups, packing)
        packed[f"{name}.scales"] = torch.from_numpy(scales)
        if packing.has_zero_biases and module.bias is None:
            packed[f"{name}.bias"] = torch.zeros(outputs, dtype=torch.float16)
    hf.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in linear:
        del tensors[f"{name}.weight"]
    save_file({**tensors, **packed}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": packing.options}))


def pack_gptq(
    name: str, codes: Integers, zeros: Integers, groups: Integers, packing: Packing
) -> dict[str, torch.Tensor]:
    bits = packing.bits
    stored = zeros - (packing.options.get("checkpoint_format") != "gptq_v2")
    written = groups if packing.fills_groups else np.zeros_like(groups)
    return {
        f"{name}.qweight": words(codes.T, bits, range(32 // bits)).T.contiguous(),
        f"{name}.qzeros": words(stored, bits, range(32 // bits)),
        f"{name}.g_idx": torch.from_numpy(written.astype(np.int32)),
    }


def pack_awq(
    name: str, codes: Integers, zeros: Integers, groups: Integers, packing: Packing
) -> dict[str, torch.Tensor]:
    return {f"{name}.qweight": words(codes, 4, AWQ_ORDER), f"{name}.qzeros": words(zeros, 4, AWQ_ORDER)}


def words(values: Integers, bits: int, order: Any) -> torch.Tensor:
    """Join successive values of a row in words of 32 bits, the first of `order` in the lowest."""
    rows, size = values.shape
    packed = np.zeros((rows, size * bits // 32), np.uint32)
    for place, number in enumerate(order):
        packed |= values[:, number :: 32 // bits].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(packed.view(np.int32))
