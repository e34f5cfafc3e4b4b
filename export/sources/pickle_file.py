"""Reader of weights that PyTorch saved, without PyTorch and without running a pickle.

A file is a zip archive of a pickle and one stored member for each storage, or, from before PyTorch
1.6, several pickles that the bytes of the storages follow. The operations of a pickle are decoded
by `pickletools`, and only those below have an effect: they make dictionaries, lists, tuples, texts,
numbers and descriptions of tensors. No object is created and no function called by its name. The
bytes of a tensor are mapped into memory when it is read.
"""

import io
import math
import mmap
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.safetensors_file import FLOATS, as_float32, check_dtype

CONVERT = (
    "convert it on a trusted machine: load the model with transformers' from_pretrained, and save it with "
    "save_pretrained, which writes safetensors"
)
MAX_PICKLE_BYTES = 64 << 20  # of the pickle in an archive; that of a model with a thousand tensors has 0.2 MB
_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file from before PyTorch 1.6
_LOCAL_HEADER = 30  # bytes of the header of a member of a zip archive, before its name
# Type as in safetensors, and bytes of an element.
_STORAGES = {
    "torch DoubleStorage": ("F64", 8), "torch FloatStorage": ("F32", 4), "torch HalfStorage": ("F16", 2),
    "torch BFloat16Storage": ("BF16", 2), "torch LongStorage": ("I64", 8), "torch IntStorage": ("I32", 4),
    "torch ShortStorage": ("I16", 2), "torch CharStorage": ("I8", 1), "torch ByteStorage": ("U8", 1),
    "torch BoolStorage": ("BOOL", 1),
}  # fmt: skip
_TENSORS = ("torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2")
_DICTIONARY, _PARAMETER = "collections OrderedDict", "torch._utils _rebuild_parameter"
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Mapping[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING",
    "SHORT_BINSTRING",
}  # fmt: skip


@dataclass(frozen=True)
class _Global:
    """The name of a class or a function in a pickle."""

    name: str  # module and name


@dataclass(frozen=True)
class _Storage:
    """The elements that tensors are views of."""

    dtype: str  # as in safetensors, such as "BF16"
    size: int  # of an element, in bytes
    key: str
    count: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.size


@dataclass(frozen=True)
class PickledTensor:
    """A view of a storage; positions count its elements."""

    storage: _Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PickleFile:
    """A file of pickled tensors, of which nothing but the pickle has been read."""

    def __init__(self, path: Path, name: str) -> None:
        """Read and validate the pickle; `name` is that of the file in errors.

        Raises `ImportFailedError` if it has more than tensors, or a tensor is not within its
        storage, or the storage not within the file.
        """
        self._path, self._name = path, name
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                is_archive = mapped[:4] == b"PK\3\4"
                weights, self._offsets = _read_archive(file) if is_archive else _read_pickles(mapped)
            if isinstance(weights, dict) and isinstance(weights.get("state_dict"), dict):
                weights = weights["state_dict"]
            if not isinstance(weights, dict) or not weights:
                raise ImportFailedError(f"{name}: the pickle has no dictionary of tensors; {CONVERT}")
            for key, tensor in weights.items():
                if not isinstance(key, str) or not isinstance(tensor, PickledTensor):
                    raise ImportFailedError(
                        f"{name}: the pickle has the entry {key!r}, which is not a tensor; {CONVERT}"
                    )
                _check_view(key, tensor, self._offsets, path.stat().st_size)
        # pickletools and zipfile raise these for damaged files, and indices of an empty stack.
        except (ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
            if isinstance(error, ImportFailedError):
                raise
            reason = str(error).partition("\n")[0][:200] or type(error).__name__
            raise ImportFailedError(
                f"{name}: the pickle has more than tensors or is damaged, so it is not read ({reason}); {CONVERT}"
            ) from None
        self.entries: Mapping[str, PickledTensor] = weights

    def read(self, tensor: str) -> NDArray[np.float32]:
        """Read a floating-point tensor and convert it to float32."""
        import ml_dtypes  # noqa: F401 - lets NumPy know bfloat16

        entry, size = self.entries[tensor], self.entries[tensor].storage.size
        check_dtype(entry.storage.dtype, tensor, self._name)
        if 0 in entry.shape:
            return np.zeros(entry.shape, np.float32)
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            start = self._offsets[entry.storage.key][0] + entry.start * size
            strides = [stride * size for stride in entry.strides]
            values: NDArray[Any] = np.ndarray(entry.shape, FLOATS[entry.storage.dtype], mapped, start, strides)
            read = as_float32(np.array(values, order="C"), tensor, self._name)
            del values  # it refers to the mapped file
            return read


def _read_archive(file: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return what an archive has, and the begin and the end of each storage in the file."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        (pickled,) = [member.filename for member in members if member.filename.endswith("/data.pkl")] or [""]
        root = pickled.removesuffix("data.pkl")
        names = {member.filename: member for member in members}
        if not root or root.count("/") != 1 or len(names) < len(members):
            raise ValueError("the archive is not one that PyTorch wrote")
        offsets, end = {}, 0
        for member in sorted(members, key=lambda member: member.header_offset):
            if (
                member.compress_type != zipfile.ZIP_STORED
                or member.flag_bits & 1
                or member.file_size != member.compress_size
            ):
                raise ValueError("a member is compressed or encrypted")
            if member.header_offset < end:
                raise ValueError("members overlap")
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER)
            lengths = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))  # of the name and more
            begin = member.header_offset + len(header) + lengths
            if header[:4] != b"PK\3\4" or begin + member.file_size > archive.start_dir:
                raise ValueError("a member is cut off")
            end = begin + member.file_size
            offsets[member.filename] = (begin, end)
        begin, end = offsets[pickled]
        if end - begin > MAX_PICKLE_BYTES:
            raise ValueError(f"its pickle has more than {MAX_PICKLE_BYTES:,} bytes")
        file.seek(begin)
        weights = _load(io.BytesIO(file.read(end - begin)))
        order = offsets.get(f"{root}byteorder", (0, 0))
        file.seek(order[0])
        if order[1] and file.read(order[1] - order[0]) != b"little":
            raise ValueError("its bytes are in big-endian order")
    data = f"{root}data/"
    return weights, {name.removeprefix(data): extent for name, extent in offsets.items() if name.startswith(data)}


def _read_pickles(mapped: mmap.mmap) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return what a file from before PyTorch 1.6 has, and the begin and the end of each storage.

    The file is mapped because reading a size that a pickle states allocates it first.
    """
    if mapped[:1] != b"\x80":
        raise ValueError("it does not begin as a file of PyTorch; if it is a pointer of Git LFS, download the file")
    if _load(mapped) != _MAGIC or _load(mapped) != 1001:
        raise ValueError("it is a pickle that torch.save did not write")
    if not _expect(_load(mapped), dict).get("little_endian", True):
        raise ValueError("its bytes are in big-endian order")
    storages: dict[str, _Storage] = {}
    weights, keys = _load(mapped, storages), _load(mapped)
    begin, offsets = mapped.tell(), {}
    for key in _expect(keys, list):
        if int.from_bytes(mapped[begin : begin + 8], "little") != storages[key].count:
            raise ValueError("a storage has another size than the pickle states")
        offsets[key] = (begin + 8, begin + 8 + storages[key].num_bytes)
        begin = offsets[key][1]
    if begin > len(mapped):
        raise ValueError(f"the file is truncated: it has {len(mapped):,} bytes, and needs {begin:,}")
    return weights, offsets


def _load(file: BinaryIO | mmap.mmap, storages: dict[str, _Storage] | None = None) -> Any:
    """Return what a pickle describes, and add its storages.

    Anything else than tensors raises `ValueError`, or another error of a lookup or a type.
    """
    stack: list[Any] = []
    marks: list[int] = []  # sizes of the stack at the marks on it
    memo: dict[int, Any] = {}

    def from_mark() -> list[Any]:
        items = stack[marks[-1] :]
        del stack[marks.pop() :]
        return items

    argument: Any
    for operation, argument, _ in pickletools.genops(file):  # type: ignore[arg-type] # it only reads
        code = operation.name
        if code in _VALUES:
            stack.append(argument)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code == "MARK":
            marks.append(len(stack))
        elif code in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            items = from_mark() if code == "TUPLE" else [stack.pop() for _ in range(int(code[-1]))][::-1]
            stack.append(tuple(items))
        elif code in ("APPEND", "APPENDS"):
            items = from_mark() if code == "APPENDS" else [stack.pop()]
            _expect(stack[-1], list).extend(items)
        elif code in ("SETITEM", "SETITEMS"):
            items = from_mark() if code == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
            _fill(stack[-1], list(zip(items[::2], items[1::2], strict=True)))
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            parts = [argument] if code == "GLOBAL" else [_expect(stack.pop(), str) for _ in range(2)][::-1]
            stack.append(_known(" ".join(parts)))
        elif code == "BINPERSID":
            storage = _storage(stack.pop())
            if storages is not None and storages.setdefault(storage.key, storage) != storage:
                raise ValueError("a storage has two types or sizes")
            stack.append(storage)
        elif code == "REDUCE":
            arguments = _expect(stack.pop(), tuple)
            stack.append(_call(_expect(stack.pop(), _Global).name, arguments))
        elif code == "BUILD":  # versions of modules
            stack.pop()
            _expect(stack[-1], dict)
        elif code not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the operation {code} has no use in a file of tensors")
    (result,) = stack
    return result


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} is in the place of a {kind.__name__}")
    return value


def _known(name: str) -> _Global:
    if name not in _STORAGES and name not in (*_TENSORS, _DICTIONARY, _PARAMETER):
        raise ValueError(f"it names {name[:80]!r}, which is no part of a tensor that is supported")
    return _Global(name)


def _fill(target: Any, pairs: Any) -> dict[str | int, Any]:
    """Add pairs to a dictionary, whose keys are texts or numbers: hashing others may take long."""
    for key, value in _expect(pairs, list):
        if not isinstance(key, str | int):
            raise ValueError("a key of a dictionary is not a text")
        _expect(target, dict)[key] = value
    return target  # type: ignore[no-any-return]


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a function that a pickle calls."""
    if name == _DICTIONARY:
        return _fill({}, arguments[0] if arguments else [])
    if name == _PARAMETER:
        return _expect(arguments[0], PickledTensor)
    if name not in _TENSORS:
        raise ValueError(f"it calls {name}")
    storage, start, shape, strides = arguments[:4]
    numbers = [start, *_expect(shape, tuple), *_expect(strides, tuple)]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) != len(strides):
        raise ValueError("a tensor has a negative or invalid size, stride or offset")
    return PickledTensor(_expect(storage, _Storage), start, shape, strides)


def _storage(identity: Any) -> _Storage:
    """Return the storage that a persistent id describes."""
    kind, dtype, key, _, count, *view = _expect(identity, tuple)
    name = _expect(dtype, _Global).name
    if kind != "storage" or name not in _STORAGES or not isinstance(key, str) or type(count) is not int or count < 0:
        raise ValueError("a storage has an invalid description")
    if any(part is not None for part in view):
        raise ValueError("a storage is a view of another one")
    return _Storage(*_STORAGES[name], key, count)


def _check_view(name: str, tensor: PickledTensor, offsets: Mapping[str, tuple[int, int]], size: int) -> None:
    """Check that a tensor is within its storage, whose size must be that of the pickle."""
    storage = tensor.storage
    begin, end = offsets.get(storage.key, (0, -1))
    if end - begin != storage.num_bytes:
        raise ValueError(f"the storage of {name!r} is missing, or has another size than the pickle states")
    last = tensor.start + sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    if 0 not in tensor.shape and last >= storage.count:
        raise ValueError(f"{name!r} reaches beyond its storage")
    # Strides of 0 repeat elements, and could make a small file huge.
    if math.prod(tensor.shape) > size or len(tensor.shape) > 32:
        raise ValueError(f"{name!r} has more elements than the file has bytes, or more than 32 dimensions")
