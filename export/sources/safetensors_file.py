"""Reader of safetensors files with NumPy.

The header is validated before any tensor is read, and tensors are read one at a time. The format is
documented at https://huggingface.co/docs/safetensors.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.export.import_errors import ImportFailedError

MAX_HEADER_BYTES = 100_000_000  # limit of the format
BLOCK = 1 << 22  # elements that are converted at once, to limit memory
# NumPy dtypes of the values in a file. bfloat16 is read as the upper 16 bits of float32.
FLOAT_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor in a safetensors file."""

    dtype: str  # name in the format, such as "BF16"
    shape: tuple[int, ...]
    offset: int  # in bytes from the beginning of the file


class SafetensorsFile:
    """A safetensors file whose header has been validated. It is opened for each read."""

    def __init__(self, path: Path, name: str) -> None:
        """Read and validate the header; `name` is that of the file in errors."""
        self._path, self._name = path, name
        with path.open("rb", buffering=0) as file:
            self.entries = _read_header(file, name)

    def read(self, tensor: str) -> NDArray[np.float32]:
        """Read a floating-point tensor and convert it to float32.

        Raises `ImportFailedError` if float32 cannot hold a value, or the file has become shorter.
        """
        entry = self.entries[tensor]
        dtype = numpy_dtype(entry.dtype, tensor, self._name)
        count = math.prod(entry.shape)
        values = np.empty(count, np.float32)
        with self._path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            for start in range(0, count, BLOCK):
                block = np.empty(min(BLOCK, count - start), dtype)
                self._read_into(block, file)
                part = as_float32(block, entry.dtype, tensor, self._name)
                values[start : start + len(part)] = part
        return values.reshape(entry.shape)

    def _read_into(self, block: NDArray[Any], file: FileIO) -> None:
        data = block.view(np.uint8).data
        while data:  # one call may read only a part
            read = file.readinto(data)
            if not read:
                raise ImportFailedError(f"{self._name} became shorter while it was read; export it again")
            data = data[read:]


def numpy_dtype(dtype: str, tensor: str, file: str) -> np.dtype[Any]:
    """Return the NumPy dtype of weights. Raises `ImportFailedError` unless they are floats."""
    if dtype not in FLOAT_DTYPES:
        raise ImportFailedError(
            f"{file}: tensor {tensor} has the type {dtype}, but weights must be {', '.join(FLOAT_DTYPES)}; use the "
            "checkpoint that is not quantized"
        )
    return np.dtype(FLOAT_DTYPES[dtype])


def as_float32(block: NDArray[Any], dtype: str, tensor: str, file: str) -> NDArray[np.float32]:
    """Convert values of a tensor. Raises `ImportFailedError` if float32 cannot hold one of them."""
    with np.errstate(over="ignore"):
        part = _widen(block) if dtype == "BF16" else block.astype(np.float32, copy=False)
    if not np.isfinite(part).all():
        raise ImportFailedError(
            f"{file}: tensor {tensor} has values that are not finite float32 numbers (NaN, infinity or too large); the "
            "checkpoint is damaged or its training diverged"
        )
    return part


def _widen(block: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16, given as its bits, to float32."""
    bits = block.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _read_header(file: FileIO, name: str) -> dict[str, SafetensorsTensor]:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or 8 + length > size:
        raise ImportFailedError(
            f"{name} is truncated or is not a safetensors file: it has {size:,} bytes, which is less than its header "
            "needs; download it again"
        )
    if length > MAX_HEADER_BYTES:
        raise ImportFailedError(
            f"{name} is not a valid safetensors file: its header has {length:,} bytes, and the format allows "
            f"{MAX_HEADER_BYTES:,}"
        )
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {tensor: _read_entry(tensor, fields, 8 + length) for tensor, fields in header.items()}
    except (ValueError, RecursionError) as error:
        raise ImportFailedError(f"{name} is not a valid safetensors file: {error}") from None
    _check_extents(entries, 8 + length, size, name)
    return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{duplicate!r} occurs twice")
    return fields


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_entry(tensor: str, fields: Any, start: int) -> SafetensorsTensor:
    """Return an entry of the header; the data of the tensors begin at `start`."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"the entry of {tensor!r} is not an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise ValueError(f"{tensor!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise ValueError(f"{tensor!r} has the invalid shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{tensor!r} has the invalid data_offsets {offsets!r}")
    expected = math.prod(shape) * ITEM_BITS[dtype] // 8
    if offsets[1] - offsets[0] != expected:
        raise ValueError(f"{tensor!r} needs {expected:,} bytes, but its data_offsets span {offsets[1] - offsets[0]:,}")
    return SafetensorsTensor(dtype, tuple(shape), start + offsets[0])


def _check_extents(entries: Mapping[str, SafetensorsTensor], start: int, size: int, name: str) -> None:
    """Check that the tensors follow each other from `start` without gaps and end with the file."""
    end = start
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].offset, _num_bytes(item[1]))):
        if entry.offset != end:
            kind = "overlaps the tensor before it" if entry.offset < end else "follows a gap"
            raise ImportFailedError(f"{name} is not a valid safetensors file: the data of {tensor!r} {kind}")
        end += _num_bytes(entry)
    if end > size:
        raise ImportFailedError(f"{name} is truncated: it has {size:,} bytes and needs {end:,}; download it again")
    if end < size:
        raise ImportFailedError(f"{name} is not a valid safetensors file: {size - end:,} bytes follow its last tensor")


def _num_bytes(entry: SafetensorsTensor) -> int:
    return math.prod(entry.shape) * ITEM_BITS[entry.dtype] // 8
