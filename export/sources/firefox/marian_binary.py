"""Reader of Marian's binary models (`.bin`), as Firefox's translation models are published.

Format (`src/common/binary.cpp` of Marian), little-endian: version (uint64, 1), number of tensors N
(uint64), N headers of four uint64 (length of the name, type, number of axes, length of the data),
the names with a final zero byte, the shapes (int32), the number of padding bytes (uint64) and the
padding, then the data of the tensors one after another. The tensor `special:model.yml` contains the
configuration as YAML.

A quantised matrix W ("intgemm8") is a matrix of int8, which is followed by its multiplier as
float32: W = q / multiplier. Matrices with inputs as rows are stored transposed, embeddings are not.
Files named `.alphas.bin` also have a multiplier for the inputs of each matrix,
`NAME_QuantMultA`, which a model in float32 does not need.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.export.import_errors import ImportFailedError

FLOAT32, INT8, INTGEMM8 = 0x404, 0x101, 0x4101  # type numbers
VERSION = 1
CONFIG = "special:model.yml"  # tensor with the configuration
MAX_TENSORS = 10_000
MAX_AXES = 8
MAX_UNPACKED_BYTES = 1 << 30  # of a .gz file


@dataclass(frozen=True)
class _Entry:
    """A tensor in the file."""

    type_number: int
    shape: tuple[int, ...]
    start: int
    length: int


class MarianModel:
    """Tensors and configuration of a Marian model."""

    def __init__(self, data: bytes, file: str) -> None:
        """Read the headers; use `read_marian` for a file. `file` is its name in errors."""
        self._data, self._file = data, file
        entries = self._read_headers()
        self.config: Mapping[str, Any] = self._read_config(entries.get(CONFIG))
        # Tensors of the model in float32. The shape of a matrix is (inputs, outputs).
        self.entries = {
            name: entry
            for name, entry in entries.items()
            if not name.startswith("special:") and not name.endswith("_QuantMultA")
        }

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a copy of a tensor in float32, whose values are finite.

        Matrices have the shape (inputs, outputs), so that a layer is `x @ W + b`. Embeddings have
        the shape (vocabulary, width). Vectors have the shape (1, width).
        """
        entry = self.entries[name]
        size = math.prod(entry.shape)
        if entry.type_number == FLOAT32:
            values = np.frombuffer(self._data, "<f4", size, entry.start).reshape(entry.shape).astype(np.float32)
        else:
            (multiplier,) = struct.unpack_from("<f", self._data, entry.start + size)
            if not (math.isfinite(multiplier) and multiplier > 0):
                raise self._error(f"the multiplier of the tensor {name!r} must be positive, got {multiplier}")
            stored = np.frombuffer(self._data, np.int8, size, entry.start)
            if not name.endswith("Wemb"):
                stored = stored.reshape(entry.shape[::-1]).T
            values = np.ascontiguousarray(stored.reshape(entry.shape), np.float32) / np.float32(multiplier)
        if not np.isfinite(values).all():
            raise self._error(f"the tensor {name!r} has values that are not finite")
        return values

    def _error(self, reason: str) -> ImportFailedError:
        return ImportFailedError(
            f"{self._file} is not a Marian model that can be imported: {reason}; download it again"
        )

    def _unpack(self, layout: str, position: int) -> tuple[int, ...]:
        """Return integers at a position."""
        size = struct.calcsize(layout)
        if position + size > len(self._data):
            raise self._error(f"it is truncated: {position + size} bytes are needed, {len(self._data)} are there")
        return struct.unpack_from(layout, self._data, position)

    def _read_headers(self) -> dict[str, _Entry]:
        version, count = self._unpack("<QQ", 0)
        if version != VERSION:
            raise self._error(
                f"its version must be {VERSION}, got {version}, so it is probably not a .bin file of Marian"
            )
        if count > MAX_TENSORS:
            raise self._error(f"it must have at most {MAX_TENSORS} tensors, got {count}")
        headers = [self._unpack("<QQQQ", 16 + 32 * index) for index in range(count)]
        position = 16 + 32 * count
        names: list[str] = []
        for length, _, num_axes, _ in headers:
            if num_axes > MAX_AXES:
                raise self._error(f"a tensor must have at most {MAX_AXES} axes, got {num_axes}")
            if length > len(self._data) - position:
                raise self._error(f"it is truncated: a name needs {length} bytes")
            try:
                names.append(bytes(self._data[position : position + length]).rstrip(b"\0").decode())
            except UnicodeDecodeError:
                raise self._error(f"the name of a tensor at byte {position} is not UTF-8") from None
            position += length
        if len(set(names)) < count:
            raise self._error("a tensor occurs twice")
        shapes: list[tuple[int, ...]] = []
        for _, _, num_axes, _ in headers:
            shapes.append(self._unpack(f"<{num_axes}i", position))
            position += 4 * num_axes
        (padding,) = self._unpack("<Q", position)
        position += 8 + padding
        entries: dict[str, _Entry] = {}
        for (_, type_number, _, length), name, shape in zip(headers, names, shapes, strict=True):
            if length > len(self._data) - position:
                raise self._error(f"it is truncated: the tensor {name!r} needs {length} bytes from byte {position} on")
            entries[name] = _Entry(type_number, shape, position, length)
            self._check_entry(name, entries[name])
            position += length
        return entries

    def _check_entry(self, name: str, entry: _Entry) -> None:
        if min(entry.shape, default=1) < 1:
            raise self._error(f"the shape of the tensor {name!r} must be positive, got {entry.shape}")
        size = math.prod(entry.shape)
        if name.startswith("special:"):
            needed = size
        elif name.endswith("_QuantMultA"):
            needed = 4  # a float32, also if its type is that of its matrix
        elif entry.type_number == FLOAT32:
            needed = 4 * size
        elif entry.type_number == INTGEMM8 and len(entry.shape) == 2 and not name.endswith("_Wt"):
            needed = size + 4
        else:
            raise self._error(
                f"the tensor {name!r} has the type {entry.type_number:#x} and {len(entry.shape)} axes; supported are "
                f"float32 ({FLOAT32:#x}) and intgemm8 ({INTGEMM8:#x}, 2 axes)"
            )
        if entry.length < needed:
            raise self._error(f"the tensor {name!r} has {entry.length} bytes, its shape needs {needed}")

    def _read_config(self, entry: _Entry | None) -> dict[str, Any]:
        if entry is None:
            raise self._error(f"it has no configuration {CONFIG!r}")
        text = bytes(self._data[entry.start : entry.start + entry.length]).rstrip(b"\0")
        try:
            return parse_flat_yaml(text.decode())
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            reason = " ".join(str(error).split())
            raise self._error(f"its configuration {CONFIG!r} cannot be read: {reason}") from None


def read_marian(path: Path) -> MarianModel:
    """Read a `.bin` file, or a `.bin.gz` file."""
    return MarianModel(read_file(path), str(path))


def read_file(path: Path) -> bytes:
    """Return the content of a file, and unpack it if its name ends in `.gz`."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as packed:
            data = packed.read(MAX_UNPACKED_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ImportFailedError(f"{path} is not a complete gzip file: {error}; download it again") from None
    if len(data) > MAX_UNPACKED_BYTES:
        raise ImportFailedError(
            f"{path} must have at most {MAX_UNPACKED_BYTES} bytes when it is unpacked; download it again"
        )
    return data


def parse_flat_yaml(text: str) -> dict[str, Any]:
    """Parse YAML as Marian writes it: keys of scalars, and of lists of scalars."""
    import yaml  # type: ignore[import-untyped] # many commands do not need it

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if not isinstance(values, dict) or not all(
        isinstance(part, str | int | float | None)
        for value in values.values()
        for part in (value if isinstance(value, list) else [value])
    ):
        raise ValueError("it must have keys with numbers, texts or lists of them")
    return values
