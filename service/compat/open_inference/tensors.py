"""Tensors of the Open Inference Protocol, in JSON or as bytes after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic_core import PydanticCustomError

from sightline.service.api.endpoint import BINARY, Raw, to_json
from sightline.service.api_errors import ApiError, ErrorCode
from sightline.service.body_fields import Texts, check_texts, path_of
from sightline.service.compat.open_inference.schemas import Datatype, InferInput, InferOutput, InferResponse, InputName
from sightline.service.inference.results import check_size

LENGTH_HEADER = "Inference-Header-Content-Length"
LENGTH_BYTES = 4  # before each element of a BYTES tensor, little-endian
DTYPES: dict[Datatype, str] = {"BYTES": "O", "FP32": "<f4", "INT64": "<i8"}  # a text is an object


@dataclass(frozen=True)
class Tensor:
    """One output of a response."""

    name: str
    datatype: Datatype
    values: NDArray[Any]
    is_binary: bool  # sent as bytes after the JSON
    parameters: Mapping[str, bool] = field(default_factory=dict)  # facts about it


def padded(rows: Sequence[Any], datatype: Datatype, padding: Any = 0) -> NDArray[Any]:
    """Pad rows, numbers or nested sequences of different lengths, at the end to one tensor."""
    arrays = [np.asarray(row, DTYPES[datatype]) for row in rows]
    shape = (len(arrays), *np.max([array.shape for array in arrays], axis=0).tolist())
    check_size("padded tensors", int(np.prod(shape)), "Send fewer texts, or texts of similar length.")
    tensor = np.full(shape, padding, DTYPES[datatype])
    for index, array in enumerate(arrays):
        place: tuple[Any, ...] = (index, *map(slice, array.shape), ...)
        tensor[place] = array
    return tensor


def read_inputs(tensors: Sequence[InferInput], tail: bytes) -> dict[InputName, Texts]:
    """Return the texts of each input by its name; `tail` are the bytes after the JSON."""
    inputs: dict[InputName, Texts] = {}
    for index, tensor in enumerate(tensors):
        if tensor.name in inputs:
            raise ApiError("invalid_parameter", "It must not repeat another input.", path=f"inputs[{index}].name")
        size, is_last = tensor.parameters.binary_data_size or 0, index == len(tensors) - 1
        if size > len(tail) or (is_last and size < len(tail)):
            at_most = "" if is_last else "at most "
            after = " and the inputs before it" if index else ""
            message = f"It must be {at_most}the number of bytes after the JSON{after} ({len(tail)}), got {size}."
            raise ApiError("invalid_parameter", message, path=f"inputs[{index}].parameters.binary_data_size")
        inputs[tensor.name] = _read_texts(tensor, tail[:size], f"inputs[{index}].shape")
        tail = tail[size:]
    return inputs


def _read_texts(tensor: InferInput, packed: bytes, shape_path: str) -> Texts:
    num_rows = tensor.shape[0]
    texts = _unpack(packed, num_rows, tensor.name) if tensor.data is None else _flatten(tensor.data)
    if len(texts) != num_rows:
        at_least = "at least " if tensor.data is None and len(texts) > num_rows else ""
        message = f"It must be the number of texts in the data ({at_least}{len(texts)}), got {num_rows}."
        raise ApiError("invalid_parameter", message, path=shape_path)
    try:
        return check_texts(texts)
    except PydanticCustomError as error:
        path = path_of((tensor.name, *(error.context or {})["path"]))
        raise ApiError(cast(ErrorCode, error.type), error.message(), path=path) from None


def _flatten(data: Sequence[Any]) -> list[Any]:
    return [text for row in data for text in (row if isinstance(row, list) else [row])]


def _unpack(data: bytes, max_texts: int, name: str) -> list[str]:
    """Return the texts of the BYTES tensor `name`; stop after `max_texts` + 1 of them."""
    texts: list[str] = []
    end = 0
    while end < len(data) and len(texts) <= max_texts:
        start = end + LENGTH_BYTES
        end = start + int.from_bytes(data[end:start], "little")
        if end > len(data):
            raise ApiError("invalid_parameter", "The last text ends after the data.", path=name)
        try:
            texts.append(data[start:end].decode())
        except UnicodeDecodeError:
            raise ApiError("invalid_parameter", "It must be UTF-8.", path=f"{name}[{len(texts)}]") from None
    return texts


def _pack(tensor: Tensor) -> bytes:
    if tensor.datatype != "BYTES":
        return tensor.values.tobytes()
    texts = [text.encode() for text in tensor.values.flat]
    return b"".join(len(text).to_bytes(LENGTH_BYTES, "little") + text for text in texts)


def tensor_response(head: dict[str, Any], tensors: Sequence[Tensor]) -> InferResponse | Raw:
    """Return the response of a call: JSON, followed by the binary tensors."""
    check_size("tensors", sum(tensor.values.size for tensor in tensors), "Request fewer outputs, or send fewer texts.")
    outputs: list[InferOutput] = []
    packed: list[bytes] = []
    for tensor in tensors:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.values.shape}
        parameters: dict[str, Any] = dict(tensor.parameters)
        if tensor.is_binary:
            packed.append(_pack(tensor))
            parameters["binary_data_size"] = len(packed[-1])
        else:
            flat = tensor.values.reshape(-1)
            output["data"] = flat.tolist() if tensor.datatype == "BYTES" else flat
        outputs.append(cast(InferOutput, output | ({"parameters": parameters} if parameters else {})))
    response = cast(InferResponse, head | {"outputs": outputs})
    if not packed:
        return response
    header = to_json(response)
    headers = {LENGTH_HEADER: str(len(header))}
    return Raw(b"".join([header, *packed]), BINARY, headers=headers)
