"""External data of ONNX graphs written by the package `onnx`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from sightline.base.external_data import ExternalTensor, are_finite, external_tensors


def external(file: str, **entries: str) -> TensorProto:
    tensor = TensorProto(name=file, dims=[2, 3], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": file, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def model_with(*tensors: TensorProto) -> ModelProto:
    return helper.make_model(helper.make_graph([], "graph", [], [], list(tensors)))


def in_an_attribute(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["value"], value=external("hidden")))


def in_a_list_of_tensors(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Many", [], ["value"], values=[external("hidden")]))


def in_a_branch_of_a_branch(model: ModelProto) -> None:
    inner = helper.make_graph([], "inner", [], [], [external("hidden")])
    outer = helper.make_graph([helper.make_node("Loop", [], [], body=inner)], "outer", [], [])
    model.graph.node.append(helper.make_node("If", ["condition"], [], then_branch=outer))


def in_a_sparse_initializer(model: ModelProto) -> None:
    indices = onnx.numpy_helper.from_array(np.zeros(6, np.int64), "indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(external("hidden"), indices, [6]))


def in_a_function(model: ModelProto) -> None:
    node = helper.make_node("Constant", [], ["value"], value=external("hidden"))
    model.functions.append(helper.make_function("own", "Own", [], ["value"], [node], []))


def in_training(model: ModelProto) -> None:
    model.training_info.add().initialization.initializer.append(external("hidden"))


@pytest.mark.parametrize(
    "add",
    [
        in_an_attribute,
        in_a_list_of_tensors,
        in_a_branch_of_a_branch,
        in_a_sparse_initializer,
        in_a_function,
        in_training,
    ],
)
def test_external_data_is_found_in_every_location_of_a_tensor(add: Callable[[ModelProto], None]) -> None:
    inline = onnx.numpy_helper.from_array(np.zeros(3, np.float32), "inline")
    model = model_with(external("weights", offset="64", length="24"), inline)
    add(model)
    assert external_tensors(model.SerializeToString()) == {
        ExternalTensor("weights", TensorProto.FLOAT, 64, 6),
        ExternalTensor("hidden", TensorProto.FLOAT, 0, 6),
    }


def test_a_field_that_occurs_twice_hides_nothing() -> None:
    first, second = model_with(external("first")), model_with(external("second"))
    data = first.SerializeToString() + second.SerializeToString()  # protobuf merges the two
    assert {tensor.file for tensor in external_tensors(data)} == {"first", "second"}


def without_location(model: ModelProto) -> None:
    del model.graph.initializer[0].external_data[0]


def with_two_locations(model: ModelProto) -> None:
    model.graph.initializer[0].external_data.add(key="location", value="elsewhere")


def with_an_offset_that_is_no_number(model: ModelProto) -> None:
    model.graph.initializer[0].external_data.add(key="offset", value="here")


@pytest.mark.parametrize("damage", [without_location, with_two_locations, with_an_offset_that_is_no_number])
def test_a_malformed_reference_is_rejected(damage: Callable[[ModelProto], None]) -> None:
    model = model_with(external("weights", length="24"))
    damage(model)
    with pytest.raises(ValueError, match=r"exactly once|invalid literal"):
        external_tensors(model.SerializeToString())


@pytest.mark.parametrize("data", [b"no graph", b"\x3a\x7f", b"\x0b" * 200])
def test_a_file_that_is_no_model_is_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an ONNX model"):
        external_tensors(data)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_finite_numbers_are_distinguished_by_their_type(tmp_path: Path, dtype: type[np.floating]) -> None:
    numbers, data_type = np.zeros(70_000, dtype), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensor = ExternalTensor("weights", data_type, 2 * numbers.itemsize, len(numbers) - 2)
    for index, value, is_well in ((0, np.nan, True), (2, 1, True), (69_999, -np.inf, False), (2, np.nan, False)):
        changed = numbers.copy()
        changed[index] = value
        changed.tofile(tmp_path / "weights")
        assert are_finite(tmp_path / "weights", [tensor]) == is_well
    as_integers = ExternalTensor("weights", TensorProto.INT64, 0, len(numbers))
    assert are_finite(tmp_path / "weights", [as_integers])


@pytest.mark.parametrize(("offset", "size"), [(0, 7), (20, 2), (-4, 3), (28, 1), (0, -1)])
def test_a_tensor_outside_its_file_is_rejected(tmp_path: Path, offset: int, size: int) -> None:
    np.zeros(6, np.float32).tofile(tmp_path / "weights")
    with pytest.raises(ValueError, match="but the file has 24 bytes"):
        are_finite(tmp_path / "weights", [ExternalTensor("weights", TensorProto.FLOAT, offset, size)])
