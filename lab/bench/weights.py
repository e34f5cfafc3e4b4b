"""Read the weights of a float32 or quantized bundle back from its graphs into a PyTorch model."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor

from sightline.base.bundle import Manifest, read_manifest
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
    read = _quantized_weights(folder, manifest) | _float_weights(folder, manifest)
    weights = {_present_name(name): tensor for name, tensor in read.items()}
    model = Transformer(_config(manifest, weights))
    model.load_state_dict(_state(weights, model.config))
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


def _float_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    weights = {}
    for graph in (manifest.encoder_graph, manifest.decoder_graph):
        for tensor in onnx.load(folder / graph.file, load_external_data=False).graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                weights[tensor.name] = torch.from_numpy(numpy_helper.to_array(tensor, str(folder)).copy())
    return weights


def _quantized_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the embedding table and the other quantized weights, dequantized, by their names in
    float32 bundles.
    """
    weights = {}
    for graph in (manifest.encoder_graph, manifest.decoder_graph):
        proto = onnx.load(folder / graph.file, load_external_data=False).graph
        arrays = {tensor.name: numpy_helper.to_array(tensor, str(folder)) for tensor in proto.initializer}
        for node in proto.node:
            sizes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            if node.op_type == "GatherBlockQuantized":
                rows = _table(arrays[node.input[0]], arrays[node.input[2]], sizes["bits"], sizes["block_size"])
                weights["embedding"] = torch.from_numpy(rows)
            elif node.op_type == "MatMulNBits" and node.input[1] != "embedding.codes":
                rows = dequantize(arrays[node.input[1]], arrays[node.input[2]], sizes["bits"])[:, : sizes["K"]]
                weights[node.input[1].removesuffix(".codes")] = torch.from_numpy(rows.T.copy())
            elif node.op_type == "MatMulIntegerToFloat":
                columns, scales = arrays[node.input[1]], arrays[node.input[3]]
                weights[node.input[1].removesuffix(".columns")] = torch.from_numpy(columns * scales)
    return weights


def _table(codes: NDArray[np.uint8], scales: NDArray[np.float32], bits: int, block_size: int) -> NDArray[np.float32]:
    """Dequantize the table of `GatherBlockQuantized` to (N, K). Unlike in `MatMulNBits`, the last
    block is not padded.
    """
    size = codes.shape[1]
    padded = np.pad(codes, [(0, 0), (0, -size % (block_size * bits // 8))])
    return dequantize(padded.reshape(*scales.shape, -1), scales, bits)[:, : size * 8 // bits].copy()


def dequantize(codes: NDArray[np.uint8], scales: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Dequantize the codes (N, blocks, bytes) and scales (N, blocks) of `MatMulNBits` without zero
    points.

    Two 4-bit codes share a byte, the first in its lower half. A code represents itself minus 2 **
    (bits - 1).

    Returns:
        The weights (N, K), with K padded to a multiple of the block size.
    """
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], -1)
    steps = codes.astype(np.float32) - (1 << (bits - 1))  # (N, blocks, block_size)
    rows: NDArray[np.float32] = (steps * scales.reshape(*steps.shape[:2], 1)).reshape(len(codes), -1)
    return rows


def _state(weights: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Map the graphs' weights to the model's parameters: transpose matrices, and split those that
    share an input.
    """
    state = {"embedding.weight": weights["embedding"]}

    def linears(source: str, *targets: str) -> None:
        matrices = weights[f"{source}.weight"].T.chunk(len(targets))
        biases = weights[f"{source}.bias"].chunk(len(targets))
        for target, matrix, bias in zip(targets, matrices, biases, strict=True):
            state[f"{target}.weight"], state[f"{target}.bias"] = matrix, bias

    def sublayer(source: str, target: str, norm: str) -> None:
        linears(source, target)
        for part in ("weight", "bias"):
            state[f"{norm}.norm.{part}"] = weights[f"{norm}.{part}"]

    def parts(name: str, which: Sequence[str]) -> list[str]:
        return [f"{name}.{part}" for part in which]

    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for number in range(layers):
            name = f"{side}.{number}"
            own, cross, inner = (f"{name}.{part}" for part in ("self_attention", "cross_attention", "feed_forward"))
            linears(f"{own}.query_key_value", *parts(own, ("query", "key", "value")))
            sublayer(f"{own}.output", f"{own}.output", f"{own}_norm")
            linears(f"{inner}.inner", f"{inner}.inner")
            sublayer(f"{inner}.outer", f"{inner}.outer", f"{inner}_norm")
            if side == "decoder":
                linears(f"{cross}.query", f"{cross}.query")
                sublayer(f"{cross}.output", f"{cross}.output", f"{cross}_norm")
    decoder = [f"decoder.{number}.cross_attention" for number in range(config.decoder_layers)]
    linears(
        "decoder.cross_attention.keys_values", *(part for name in decoder for part in parts(name, ("key", "value")))
    )
    return state
