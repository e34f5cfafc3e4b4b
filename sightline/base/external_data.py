"""Find the external data of ONNX graphs, and check that its numbers are finite.

ONNX Runtime opens every file that a graph names as external data, so these names must be checked
before the graph is loaded. The service does not depend on the package `onnx`: this module declares
the few fields of the format that lead to external data, and parses them with `protobuf`, a
dependency of ONNX Runtime.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": (_Field.TYPE_STRING, _Field.LABEL_OPTIONAL),
    "bytes": (_Field.TYPE_BYTES, _Field.LABEL_OPTIONAL),
    "float": (_Field.TYPE_FLOAT, _Field.LABEL_OPTIONAL),
    "int32": (_Field.TYPE_INT32, _Field.LABEL_OPTIONAL),
    "int64s": (_Field.TYPE_INT64, _Field.LABEL_REPEATED),
}
# Number and type of each field, by message. Fields that are not declared are skipped. All message
# fields are declared as repeated: if a malformed file repeats a field, every occurrence is read.
_SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "Model": {"graph": (7, "Graph"), "training_info": (20, "Training"), "functions": (25, "Function")},
    "Training": {"initialization": (1, "Graph"), "algorithm": (2, "Graph")},
    "Function": {"node": (7, "Node"), "attribute_proto": (11, "Attribute")},
    "Graph": {"node": (1, "Node"), "initializer": (5, "Tensor"), "sparse_initializer": (15, "SparseTensor")},
    "Node": {"attribute": (5, "Attribute")},
    "Attribute": {
        "t": (5, "Tensor"),
        "g": (6, "Graph"),
        "tensors": (10, "Tensor"),
        "graphs": (11, "Graph"),
        "sparse_tensor": (22, "SparseTensor"),
        "sparse_tensors": (23, "SparseTensor"),
    },
    "SparseTensor": {"values": (1, "Tensor"), "indices": (2, "Tensor")},
    "Tensor": {"dims": (1, "int64s"), "data_type": (2, "int32"), "external_data": (13, "Entry")},
    "Entry": {"key": (1, "string"), "value": (2, "string")},
}
_FLOATS: dict[int, type[np.floating[Any]]] = {1: np.float32, 10: np.float16, 11: np.float64}  # by TensorProto.DataType
_CHUNK = 1 << 16  # numbers checked at a time, which bounds the memory that the check uses


@dataclass(frozen=True)
class ExternalTensor:
    """A tensor that is stored in a separate file."""

    file: str
    data_type: int  # TensorProto.DataType
    offset: int  # in bytes
    size: int  # number of elements


def external_tensors(graph: bytes) -> set[ExternalTensor]:
    """Return all tensors with external data in a serialized ONNX model and its subgraphs.

    Raises `ValueError` if it is not an ONNX model, or a reference to external data is malformed.
    """
    try:
        model = _MODEL.FromString(graph)
    except DecodeError:
        raise ValueError("it is not an ONNX model") from None
    found = set[ExternalTensor]()
    for tensor in (tensor for tensor in _tensors(model) if tensor.external_data):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if len(entries) != len(tensor.external_data) or "location" not in entries:
            raise ValueError("a tensor must name the location of its external data exactly once")
        offset, size = int(entries.get("offset", "0")), math.prod(tensor.dims)
        found.add(ExternalTensor(entries["location"], tensor.data_type, offset, size))
    return found


def are_finite(path: Path, tensors: Iterable[ExternalTensor]) -> bool:
    """Return False if a tensor of floating-point numbers contains NaN or infinity.

    The file must not be empty. Raises `ValueError` if a floating-point tensor exceeds it.
    """
    data: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")  # mapped: weights may exceed the free memory
    for tensor in (tensor for tensor in tensors if tensor.data_type in _FLOATS):
        dtype = _FLOATS[tensor.data_type]
        end = tensor.offset + tensor.size * np.dtype(dtype).itemsize
        if not 0 <= tensor.offset <= end <= len(data):
            raise ValueError(f"a tensor occupies bytes {tensor.offset} to {end}, but the file has {len(data)} bytes")
        numbers = data[tensor.offset : end].view(dtype)
        if not all(np.isfinite(numbers[start : start + _CHUNK]).all() for start in range(0, tensor.size, _CHUNK)):
            return False
    return True


def message_class(schema: Mapping[str, Mapping[str, tuple[int, str]]]) -> Any:
    """Return the protobuf class for the first message of a schema, see `_SCHEMA`."""
    file = descriptor_pb2.FileDescriptorProto(name="schema.proto", package="schema", syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            declared, label = _SCALARS.get(kind, (_Field.TYPE_MESSAGE, _Field.LABEL_REPEATED))
            type_name = None if kind in _SCALARS else f".schema.{kind}"
            message.field.add(name=field, number=number, type=declared, type_name=type_name, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"schema.{next(iter(schema))}"))


_MODEL = message_class(_SCHEMA)


def _tensors(message: Any) -> Iterator[Any]:
    if message.DESCRIPTOR.name == "Tensor":
        yield message
        return
    for _, parts in message.ListFields():
        for part in parts:
            yield from _tensors(part)
