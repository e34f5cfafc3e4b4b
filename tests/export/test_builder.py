from pathlib import Path

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto

from sightline.export.graphs.builder import ALIGNMENT_BYTES, GraphBuilder, WeightFile


def test_equal_tensors_of_two_graphs_are_stored_once(tmp_path: Path) -> None:
    weights, table = WeightFile(tmp_path / "weights.bin"), torch.arange(6.0)
    offsets = []
    for name in ("a", "b"):
        graph = GraphBuilder(name, weights)
        graph.weight(f"table.{name}", table)
        (tensor,) = graph.build().graph.initializer
        offsets.append([entry.value for entry in tensor.external_data])
    weights.close()
    assert offsets[0] == offsets[1] == ["weights.bin", "0", "24"]
    assert (tmp_path / "weights.bin").stat().st_size == ALIGNMENT_BYTES


def test_each_tensor_lies_at_its_offset(tmp_path: Path) -> None:
    weights = WeightFile(tmp_path / "weights.bin")
    parts = [b"first", b"second" * 20, b"third"]
    offsets = [weights.add(part) for part in parts]
    weights.close()
    data = (tmp_path / "weights.bin").read_bytes()
    assert all(data[offset:].startswith(part) for offset, part in zip(offsets, parts, strict=True))
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)


def test_a_graph_runs_with_its_weights_beside_it(tmp_path: Path) -> None:
    weights = WeightFile(tmp_path / "weights.bin")
    graph = GraphBuilder("double", weights)
    weight = graph.weight("matrix", 2 * torch.eye(3))
    x = graph.input("x", TensorProto.FLOAT, ("batch", 3))
    graph.add("MatMul", x, weight, output=graph.output("y", TensorProto.FLOAT, ("batch", 3)))
    (tmp_path / "double.onnx").write_bytes(graph.build().SerializeToString())
    weights.close()
    session = onnxruntime.InferenceSession(str(tmp_path / "double.onnx"), providers=["CPUExecutionProvider"])
    (given,) = session.run(["y"], {"x": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(given, np.full((2, 3), 2.0))


def test_half_weights_are_widened_only_if_float16_is_lossless(tmp_path: Path) -> None:
    weights = WeightFile(tmp_path / "weights.bin", half=True)
    graph = GraphBuilder("sum", weights)
    x = graph.input("x", TensorProto.FLOAT, ("batch", 2))
    tensors = {"exact": torch.tensor([[1.5, -2.0]]), "inexact": torch.tensor([[0.1, 7e4]]), "vector": torch.ones(2)}
    for name, tensor in tensors.items():
        assert graph.weight(name, tensor) == graph.weight(name, tensor) == name
    total = graph.add("Sum", x, *tensors)
    graph.add("Identity", total, output=graph.output("y", TensorProto.FLOAT, ("batch", 2)))
    model = graph.build()
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert stored == {"exact.float16": TensorProto.FLOAT16, "inexact": TensorProto.FLOAT, "vector": TensorProto.FLOAT}
    (tmp_path / "sum.onnx").write_bytes(model.SerializeToString())
    weights.close()
    session = onnxruntime.InferenceSession(str(tmp_path / "sum.onnx"), providers=["CPUExecutionProvider"])
    (given,) = session.run(["y"], {"x": np.zeros((1, 2), np.float32)})
    np.testing.assert_array_equal(given, sum(tensor.reshape(1, 2) for tensor in tensors.values()))
