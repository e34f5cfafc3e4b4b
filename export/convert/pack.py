"""Storage of matrices in 8 bits, from which ONNX Runtime computes float32 when it loads a graph.

Unlike `sightline.export.convert.quantize`, this reaches every matrix, also those of recurrent
layers and embeddings, and changes neither operators nor speed: only the files are smaller.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from sightline.export.graphs.builder import WeightFile, external_tensor, rewritten_tensor

LEVELS = 127  # codes on each side of zero
MIN_SIZE = 1024  # elements of a matrix that is worth two more nodes

Floats = NDArray[np.float32]


def round_matrix(matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round a matrix (..., R, C) to codes with a scale for each row or each column.

    Of the two, the one with the smaller sum of squared errors is chosen.

    Returns:
        Codes (..., R, C) and scales (..., R, 1) or (..., 1, C): their product is the matrix.
    """
    rounded = []
    for axis in (-1, -2):
        scales = np.abs(matrix).max(axis=axis, keepdims=True) / np.float32(LEVELS)
        steps = np.divide(matrix, scales, out=np.zeros_like(matrix), where=scales != 0)
        rounded.append((np.rint(steps).astype(np.int8), scales))
    return min(rounded, key=lambda pair: float(np.square(pair[0] * pair[1] - matrix).sum(dtype=np.float64)))


def pack_graph(model: onnx.ModelProto, folder: Path, weights: WeightFile) -> onnx.ModelProto:
    """Return a graph whose float32 and float16 matrices are stored in 8 bits in `weights`.

    The graph has external weights in `folder`, as `GraphBuilder` builds it.
    """
    graph = model.graph
    widened = {node.input[0]: node for node in graph.node if node.op_type == "Cast"}
    constants, nodes, replaced = list[TensorProto](), list[NodeProto](), set[str]()
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor, str(folder))
        is_half = array.dtype == np.float16 and tensor.name in widened
        if array.ndim < 2 or array.size < MIN_SIZE or not (is_half or array.dtype == np.float32):
            constants.append(rewritten_tensor(tensor, array, weights))
            continue
        name = str(widened[tensor.name].output[0]) if is_half else tensor.name
        if is_half:
            replaced.add(name)
        codes, scales = round_matrix(array.astype(np.float32))
        constants.append(external_tensor(f"{name}.codes", codes, weights))
        constants.append(external_tensor(f"{name}.scales", scales, weights))
        nodes.append(helper.make_node("Cast", [f"{name}.codes"], [f"{name}.steps"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [f"{name}.steps", f"{name}.scales"], [name]))
    nodes += (node for node in graph.node if node.output[0] not in replaced)
    packed = helper.make_graph(nodes, graph.name, graph.input, graph.output, constants)
    return helper.make_model(packed, opset_imports=model.opset_import, ir_version=model.ir_version)
