"""Read the weights of a float32 or quantized bundle back from its graphs into a PyTorch model."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor

from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_manifest
from sightline.model.architectures.transformer import Transformer
from sightline.model.config import TransformerConfig

# Names of constants in the shipped bundles, and the present ones.
OLD_NAMES = {
    r"attention\.qkv\.": "attention.query_key_value.",
    r"^cross_attention\.": "decoder.cross_attention.",
    r"attention\.output\.norm\.": "attention_norm.",
    r"feed_forward\.outer\.norm\.": "feed_forward_norm.",
}


def read_model(folder: Path) -> Transformer:
    """Return the model of an encoder-decoder Transformer's bundle, in evaluation mode.

    Float32 weights are read as they are and quantized ones are dequantized. The embedding is read
    from the lookup table, because the vocabulary projection may use another quantization of it.
    """
    manifest = read_manifest(folder)
    weights = {_present_name(name): tensor for name, tensor in _weights(folder, manifest).items()}
    model = Transformer(_config(manifest, weights))
    layers = model.config.decoder_layers
    model.load_state_dict({name: _parameter(name, weights, layers) for name in model.state_dict()})
    return model.eval()


def _present_name(name: str) -> str:
    """Return the present name of a constant; the shipped bundles were exported with other names."""
    for old, new in OLD_NAMES.items():
        name = re.sub(old, new, name)
    return name


def _config(manifest: Manifest, weights: dict[str, Tensor]) -> TransformerConfig:
    vocab_size, d_model = weights["embedding"].shape
    return TransformerConfig(
        vocab_size,
        d_model=d_model,
        num_heads=manifest.attention_of("decoder").heads,
        d_ff=weights["encoder.0.feed_forward.inner.weight"].shape[1],
        encoder_layers=manifest.attention_of("encoder").layers,
        decoder_layers=manifest.attention_of("decoder").layers,
        max_positions=manifest.limits.max_source_tokens,
        pad_id=manifest.tokens.pad_id,
        bos_id=manifest.tokens.start_ids[0],
        eos_id=manifest.tokens.end_id,
    )


def _weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the weights of all graphs, dequantized and with their names in float32 bundles."""
    floats, quantized = dict[str, Any](), dict[str, Any]()
    for graph in (manifest.encoder_graph, manifest.decoder_graph):
        proto = onnx.load(folder / graph.file, load_external_data=False).graph
        arrays = {tensor.name: numpy_helper.to_array(tensor, str(folder)) for tensor in proto.initializer}
        floats |= {name: array for name, array in arrays.items() if array.dtype == np.float32}
        for node in proto.node:
            sizes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            inputs: list[Any] = [arrays.get(name) for name in node.input]
            if node.op_type == "GatherBlockQuantized":
                quantized["embedding"] = _table(inputs[0], inputs[2], sizes["bits"], sizes["block_size"])
            elif node.op_type == "MatMulNBits" and node.input[1] != "embedding.codes":
                rows = dequantize(inputs[1], inputs[2], sizes["bits"])[:, : sizes["K"]]
                quantized[node.input[1].removesuffix(".codes")] = rows.T
            elif node.op_type == "MatMulIntegerToFloat":
                quantized[node.input[1].removesuffix(".columns")] = inputs[1] * inputs[3]
    return {name: torch.from_numpy(array.copy()) for name, array in (quantized | floats).items()}


def _table(codes: NDArray[np.uint8], scales: NDArray[np.float32], bits: int, block_size: int) -> NDArray[np.float32]:
    """Dequantize the table of `GatherBlockQuantized` to (N, K). Unlike in `MatMulNBits`, the last
    block is not padded.
    """
    size = codes.shape[1]
    padded = np.pad(codes, [(0, 0), (0, -size % (block_size * bits // 8))])
    return dequantize(padded.reshape(*scales.shape, -1), scales, bits)[:, : size * 8 // bits]


def dequantize(codes: NDArray[np.uint8], scales: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Dequantize codes (N, blocks, bytes) and scales (N, blocks) of `MatMulNBits` without zero
    points, to (N, K), K padded to a multiple of the block size.

    Two 4-bit codes share a byte, the first in its lower half. A code represents itself minus 2 **
    (bits - 1).
    """
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], -1)
    steps = codes.astype(np.float32) - (1 << (bits - 1))  # (N, blocks, block_size)
    rows: NDArray[np.float32] = (steps * scales.reshape(*steps.shape[:2], 1)).reshape(len(codes), -1)
    return rows


def _parameter(name: str, weights: dict[str, Tensor], decoder_layers: int) -> Tensor:
    """Return a parameter; graphs have transposed matrices, and join those that share an input."""
    if name == "embedding.weight":
        return weights["embedding"]
    module, _, kind = name.rpartition(".")
    source, index, count = module.removesuffix(".norm"), 0, 1
    if own := re.fullmatch(r"(.+\.self_attention)\.(query|key|value)", module):
        source, index, count = f"{own[1]}.query_key_value", ("query", "key", "value").index(own[2]), 3
    elif cross := re.fullmatch(r"decoder\.(\d+)\.cross_attention\.(key|value)", module):
        index, count = 2 * int(cross[1]) + (cross[2] == "value"), 2 * decoder_layers
        source = "decoder.cross_attention.keys_values"
    tensor = weights[f"{source}.{kind}"]
    return (tensor.T if tensor.dim() == 2 else tensor).chunk(count)[index]
