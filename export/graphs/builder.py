"""Builder for ONNX graphs that share one file of weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

if TYPE_CHECKING:  # imported checkpoints are exported without PyTorch
    from torch import Tensor

OPSET = 24
CONTRIB = "com.microsoft"  # domain of the operators of ONNX Runtime
ALIGNMENT_BYTES = 64  # alignment of tensors in the weight file: a cache line

Axis = str | int  # name of a dynamic axis, or size of a fixed one


class WeightFile(AbstractContextManager["WeightFile"]):
    """File with the tensors of several graphs, written as they are added; equal ones once.

    Use it in a `with` statement, or call `close`. With `half`, `GraphBuilder.weight` stores a
    matrix as float16 if float16 represents it exactly. `path` is in the folder of the graphs.
    """

    def __init__(self, path: Path, half: bool = False) -> None:
        self.name = path.name
        self.half = half
        self._file = path.open("wb")
        self._size = 0
        self._offsets: dict[bytes, int] = {}  # SHA-256 to offset

    def add(self, data: bytes | memoryview) -> int:
        """Add data and return its offset in the file; a full disk is an `OSError`."""
        digest = sha256(data).digest()
        if digest not in self._offsets:
            self._offsets[digest] = self._size
            size = memoryview(data).nbytes
            self._file.write(data)
            self._file.write(bytes(-size % ALIGNMENT_BYTES))
            self._size += size + -size % ALIGNMENT_BYTES
        return self._offsets[digest]

    def close(self) -> None:
        """Finish the file. Nothing can be added afterwards."""
        self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def external_tensor(name: str, array: NDArray[np.generic], weights: WeightFile) -> TensorProto:
    """Return a constant whose data is in the weight file."""
    proto = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
    proto.data_location = TensorProto.EXTERNAL
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    location = {"location": weights.name, "offset": weights.add(data), "length": data.nbytes}
    for key, value in location.items():
        proto.external_data.add(key=key, value=str(value))
    return proto


def rewritten_tensor(tensor: TensorProto, array: NDArray[np.generic], weights: WeightFile) -> TensorProto:
    """Return a constant with other data, which is in the weight file if its own was."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return external_tensor(tensor.name, array, weights)
    return onnx.numpy_helper.from_array(array, tensor.name)


def _fits_half(array: NDArray[np.generic]) -> bool:
    """Return True for a float32 matrix that float16 represents exactly."""
    if array.ndim < 2 or array.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        return bool((array.astype(np.float16) == array).all())


class GraphBuilder:
    """Builder of one graph. Its methods take and return names of values."""

    def __init__(self, name: str, weights: WeightFile, prefix: str = "") -> None:
        """Create a builder; `prefix` is that of the names of values without a name."""
        self._name = name
        self.prefix = prefix
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._constants: set[str] = set()  # names of weights
        self._shared: dict[str, str] = {}  # values of `once`

    def input(self, name: str, dtype: int, shape: Sequence[Axis]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[Axis]) -> str:
        """Declare an output; its node may be added before or after."""
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def weight(self, name: str, tensor: "Tensor | NDArray[np.generic]") -> str:
        """Add a constant in the weight file, unless a constant of this name exists."""
        if name not in self._constants:
            array = tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().numpy()
            self._constants.add(name)
            if self._weights.half and _fits_half(array):
                # ONNX Runtime folds the cast when it loads the graph, so that it costs nothing per
                # call.
                stored = self._store(f"{name}.float16", array.astype(np.float16))
                self.add("Cast", stored, output=name, to=TensorProto.FLOAT)
            else:
                self._store(name, array)
        return name

    def _store(self, name: str, array: NDArray[np.generic]) -> str:
        self._initializers[name] = external_tensor(name, array, self._weights)
        return name

    def constant(self, value: float | Sequence[float], dtype: type[np.generic]) -> str:
        """Add a small constant inside the graph; its name is derived from its value."""
        array: NDArray[np.generic] = np.array(value, dtype)
        name = f"{array.dtype.name}_{value}".replace(" ", "")
        self._initializers.setdefault(name, onnx.numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, *inputs: str, output: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output; by default the output is named after the node."""
        (name,) = self.add_multi(op, inputs, [output or self.unique(f"{self.prefix}{op}")], domain, **attributes)
        return name

    def add_once(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, unless this method has added an equal one, and return its output."""
        return self.once(repr((op, inputs, sorted(attributes.items()))), lambda: self.add(op, *inputs, **attributes))

    def once(self, key: str, add: Callable[[], str]) -> str:
        """Return the value that `add` returned for this key first; later calls add no nodes."""
        if key not in self._shared:
            self._shared[key] = add()
        return self._shared[key]

    def add_multi(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> Sequence[str]:
        """Add a node with several outputs; "" omits an optional input or output."""
        node = helper.make_node(op, inputs, outputs, self.unique(f"{self.prefix}{op}"), domain=domain, **attributes)
        self._nodes.append(node)
        return outputs

    def unique(self, name: str) -> str:
        """Return a unique name for an output of the next node."""
        return f"{name}_{len(self._nodes)}"

    def build(self) -> onnx.ModelProto:
        """Return the model in the oldest IR version that supports its operators."""
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        version = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
        return helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name="sightline")
