"""Reader of safetensors files, one tensor at a time. The library validates the header.

It is imported when a file is read, because other commands do not need it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.export.import_errors import ImportFailedError

# Types of weights, and their names in NumPy.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor in a safetensors file."""

    dtype: str  # name in the format, such as "BF16"
    shape: tuple[int, ...]


class SafetensorsFile:
    """A safetensors file whose header has been validated. It is opened for each read."""

    def __init__(self, path: Path, name: str) -> None:
        """Read and validate the header; `name` is that of the file in errors."""
        self._path, self._name = path, name
        with self._open() as file:
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118 - no dictionary
            self.entries = {
                tensor: SafetensorsTensor(str(part.get_dtype()), tuple(part.get_shape()))
                for tensor, part in slices.items()
            }

    def read(self, tensor: str) -> NDArray[np.float32]:
        """Read a floating-point tensor and convert it to float32, see `as_float32`."""
        check_dtype(self.entries[tensor].dtype, tensor, self._name)
        with self._open() as file:
            return as_float32(file.get_tensor(tensor), tensor, self._name)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        import ml_dtypes  # noqa: F401 - lets NumPy know bfloat16
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="numpy") as file:
                yield file
        except SafetensorError as error:
            raise ImportFailedError(
                f"{self._name} is truncated or not a valid safetensors file: {error}; download it again"
            ) from None


def check_dtype(dtype: str, tensor: str, file: str) -> None:
    """Raise `ImportFailedError` unless the type of weights is one of floats."""
    if dtype not in FLOATS:
        raise ImportFailedError(
            f"{file}: tensor {tensor} has the type {dtype}, but weights must be {', '.join(FLOATS)}; use the "
            "checkpoint that is not quantized"
        )


def as_float32(array: NDArray[Any], tensor: str, file: str) -> NDArray[np.float32]:
    """Convert the values of a tensor. Raises `ImportFailedError` if float32 cannot hold one."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(np.float32, copy=False)
    if converted.size and not np.isfinite([converted.min(), converted.max()]).all():
        raise ImportFailedError(
            f"{file}: tensor {tensor} has values that are not finite float32 numbers (NaN, infinity or too large); the "
            "checkpoint is damaged or its training diverged"
        )
    return converted
