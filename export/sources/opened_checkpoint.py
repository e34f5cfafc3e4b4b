"""Reading of checkpoints that others wrote, in the folder layout of Hugging Face.

Nothing in the folder is executed, no path leaves it, and everything that is read is recorded:
tensors and configuration keys so that no unknown variant of an architecture is imported silently,
and files with their SHA-256 for the manifest.
"""

import fnmatch
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle_files import sha256_of
from sightline.base.errors import UsageError
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import Kind
from sightline.export.sources.pickle_file import CONVERT, PickleFile
from sightline.export.sources.safetensors_file import SafetensorsFile

CONFIG = "config.json"
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
OTHER_WEIGHTS = (  # ends of the names of files with weights that are not read
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pkl", ".pt", ".pth", ".safetensors",
)  # fmt: skip
MAX_INTEGER = (1 << 31) - 1  # of a configuration: no size or count of a model is larger
MAX_TEXT_BYTES = 256 << 20  # of a configuration or a tokenizer
MAX_NUMBER = 1e38  # near the largest of float32
NUM_NAMED = 5  # unknown keys or tensors that an error names


@dataclass(frozen=True)
class Provenance:
    """Location from which a checkpoint was downloaded, see `sightline.base.bundle.Origin`."""

    repository: str | None = None  # owner/name on a hub
    revision: str | None = None  # commit of the repository
    package: str | None = None  # NAME==VERSION of a package that held the files
    quantized: str | None = None  # encodings of weights that only approximate the original ones
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of files that were converted
    notes: tuple[str, ...] = ()  # what the conversion assumes


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when it is needed."""

    shape: tuple[int, ...]
    load: Callable[[], NDArray[np.float32]]


class Reader(Protocol):
    """Reader of a file of tensors."""

    @property
    def entries(self) -> Mapping[str, Any]: ...  # with the `shape` of each tensor
    def read(self, name: str, /) -> NDArray[np.float32]: ...


def stored_tensors(reader: Reader) -> dict[str, StoredTensor]:
    """Return the tensors of a file by their names."""
    return {name: StoredTensor(entry.shape, partial(reader.read, name)) for name, entry in reader.entries.items()}


class Tensors:
    """Read-only view of the weights of a checkpoint, which records the tensors that were read."""

    def __init__(self, stored: Mapping[str, StoredTensor], source: str = "the checkpoint") -> None:
        self._stored = dict(stored)
        self._source = source
        self._known: set[str] = set()  # read or ignored
        self.names = frozenset(self._stored)
        self.on_read: Callable[[int], None] | None = None  # called with the bytes of each tensor

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._get(name).shape

    def read(self, name: str) -> NDArray[np.float32]:
        """Read a tensor, which float32 must be able to represent. Each call reads it again."""
        tensor = self._get(name)
        self._known.add(name)
        array = tensor.load()
        if self.on_read is not None:
            self.on_read(array.nbytes)
        return array

    def _get(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise ImportFailedError(
                f"{self._source} has no tensor {name!r}, which its architecture needs; its configuration may belong to "
                "another checkpoint"
            )
        return self._stored[name]

    def check_equal(self, first: str, second: str, reason: str) -> None:
        """Check that two tensors that should be one have the same values, if both are stored.

        `reason` completes the message of the error.
        """
        if {first, second} <= self.names and not np.array_equal(self.read(first), self.read(second)):
            raise ImportFailedError(f"the tensors {first!r} and {second!r} differ, {reason}")

    def rename(self, name: str, new: str) -> None:
        """Give a tensor the name under which its architecture reads it."""
        self._stored[new] = self._stored.pop(name)
        self.names = frozenset(self._stored)

    def ignore(self, *patterns: str) -> None:
        """Mark tensors that do not change the outputs as known; patterns are those of `fnmatch`."""
        for pattern in patterns:
            self._known.update(fnmatch.filter(self.names, pattern))

    def check_all_read(self) -> None:
        """Raise `ImportFailedError` unless each tensor was read or ignored.

        With an unknown one, the checkpoint may be a variant of its architecture with other outputs.
        """
        unknown = self.names - self._known
        if unknown:
            raise ImportFailedError(
                f"{self._source} has {len(unknown)} tensors that its architecture does not use: {first_of(unknown)}; "
                "it may be an unsupported variant, so it is not imported"
            )


def first_of(names: Iterable[str]) -> str:
    """Return the first names in sorted order as text."""
    ordered = sorted(names)
    return ", ".join(ordered[:NUM_NAMED]) + (", …" if len(ordered) > NUM_NAMED else "")


class Config:
    """JSON object that records the keys that were read.

    The typed methods return the default for a missing key and for `null`, or fail without one.
    """

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values, self._file = dict(values), file
        self._known: set[str] = set()
        self._sections: dict[str, Config] = {}

    def __contains__(self, key: object) -> bool:
        """Return True if the key is there and not null. This does not count as reading it."""
        return self._values.get(key) is not None if isinstance(key, str) else False

    def get(self, key: str, default: Any = ...) -> Any:
        """Return any value, null included. A missing key without a default is an error."""
        self._known.add(key)
        if key in self._values:
            return self._values[key]
        if default is ...:
            raise ImportFailedError(f"{self._file} has no key {key!r}, which its architecture needs")
        return default

    def override(self, key: str, value: Any) -> None:
        """Set the value of a key that another file of the checkpoint decides."""
        self._values[key] = value

    def _typed(self, key: str, default: Any, kind: str, is_valid: Callable[[Any], bool]) -> Any:
        value = self.get(key, ... if default is None else default)
        if value is None and default is not None:
            return default
        if not is_valid(value):
            raise ImportFailedError(f"{self._file}: {key} must be {kind}, got {_shown(value)}")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = MAX_INTEGER) -> int:
        """Return an integer from `least` to `most`."""
        value: int = self._typed(key, default, "an integer", lambda value: type(value) is int)
        if not least <= value <= most:
            limit = f"at least {least}" if most == MAX_INTEGER and value < least else f"from {least} to {most}"
            raise ImportFailedError(f"{self._file}: {key} must be {limit}, got {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float | None = None) -> float:
        """Return a number greater than `above`, where None is no limit."""
        value = float(self._typed(key, default, "a finite number", _is_number))
        if above is not None and not value > above:
            raise ImportFailedError(f"{self._file}: {key} must be greater than {above:g}, got {value:g}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, "a string", lambda value: isinstance(value, str)))

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return bool(self._typed(key, default, "true or false", lambda value: isinstance(value, bool)))

    def section(self, key: str) -> "Config | None":
        """Return a nested object, or None if the key is missing or null.

        `check_all_read` checks the keys of the nested object, too.
        """
        value = self.get(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ImportFailedError(f"{self._file}: {key} must be an object, got {_shown(value)}")
        return self._sections.setdefault(key, Config(value, f"{self._file}: {key}"))

    def neutral(self, key: str, *values: Any) -> None:
        """Check that a key that would change the outputs is absent or has one of these values.

        Where false, 0 or nothing is one of them, null is as well.
        """
        self._known.add(key)
        value = self._values.get(key)
        if key not in self._values or (value is None and not all(values)):
            return
        if not any(_is_same(value, expected) for expected in values):
            raise ImportFailedError(
                f"{self._file}: {key} is {_shown(value)}, which is not supported; supported: "
                f"{' or '.join(['absent', *map(_shown, values)])}"
            )

    def ignore(self, *patterns: str) -> None:
        """Mark keys that do not change the outputs as known; patterns are those of `fnmatch`.

        The name of a key of a nested object begins with that of the object, as in `unread`.
        """
        for pattern in patterns:
            self._known.update(fnmatch.filter(self._values, pattern))
            section, _, nested = pattern.partition(".")
            if nested and section in self._sections:
                self._sections[section].ignore(nested)

    def unread(self) -> dict[str, Any]:
        """Return the values of keys that were neither read nor ignored, by names such as `a.b`."""
        values = {key: value for key, value in self._values.items() if key not in self._known}
        for name, section in self._sections.items():
            values |= {f"{name}.{key}": value for key, value in section.unread().items()}
        return values

    def check_all_read(self) -> None:
        """Check that each key was read or ignored: an unknown one may change the outputs."""
        unknown = self.unread()
        if unknown:
            way = "; --ignore-key NAME imports it without a key that does not" if self._file == CONFIG else ""
            raise ImportFailedError(
                f"{self._file} has {len(unknown)} keys that are not known for its architecture: {first_of(unknown)}; "
                f"they may change the outputs, so the checkpoint is not imported{way}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_same(value: Any, expected: Any) -> bool:
    """Compare values; unlike in Python, true is not 1."""
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


class FolderFiles:
    """Files of a folder that someone else wrote. Each file that is read is recorded."""

    def __init__(self, path: Path) -> None:
        """Create a view; symbolic links may only lead out of the folder into the cache of a hub."""
        self.path = path
        self.files: dict[str, str] = {}  # SHA-256 of each file that was read, by its relative name
        self._roots = [root.resolve() for root in (path, hub_cache())]

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a folder, by default in this one, sorted."""
        return sorted(entry.name for entry in (self.path / folder).glob("*") if entry.is_file())

    def has(self, name: str) -> bool:
        """Return True if the folder has a file of this relative name. Nothing is read."""
        return (self.path / _checked(name)).is_file()

    def json(self, name: str) -> Any:
        """Return the content of a JSON file, or None without one; invalid JSON is an error."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ImportFailedError(f"{self.path / name} is not valid JSON: {error}; download it again") from None

    def json_object(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file, or None if there is no such file."""
        values = self.json(name)
        if values is not None and not isinstance(values, dict):
            raise ImportFailedError(
                f"{self.path / name} must be a JSON object, got {_shown(values)}; download it again"
            )
        return values

    def text(self, name: str) -> str | None:
        """Return the content of a UTF-8 file, or None if there is no such file."""
        data = self.bytes(name)
        try:
            return None if data is None else data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ImportFailedError(f"{self.path / name} is not UTF-8: {error}") from None

    def bytes(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is no such file.

        Large files, and those outside of the folder, raise `ImportFailedError`.
        """
        path = self.locate(name)
        if path is None:
            return None
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise ImportFailedError(f"{self.path / name} has {size:,} bytes; at most {MAX_TEXT_BYTES:,} are read")
        data = path.read_bytes()
        self.files[name] = hashlib.sha256(data).hexdigest()
        return data

    def locate(self, name: str) -> Path | None:
        """Return the path of a regular file without links, or None if there is no such file."""
        path = self.path / _checked(name)
        try:
            resolved = path.resolve(strict=True)
            mode = resolved.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise ImportFailedError(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}") from None
        if not any(resolved.is_relative_to(root) for root in self._roots):
            raise ImportFailedError(
                f"{path} is a symbolic link to a file outside of the folder; copy the folder with "
                "`cp --recursive --dereference`, and export the copy"
            )
        if not stat.S_ISREG(mode):
            raise ImportFailedError(f"{path} is not a regular file")
        return resolved


class Folder(FolderFiles):
    """A checkpoint in the layout of Hugging Face."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_pickle = False  # True if weights were read from a pickle
        self.module = self._transformer_module()
        self.config = Config(self._required(f"{self.module}{CONFIG}"), CONFIG)
        self.tensors = self.open_tensors(self.module)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of classes of transformers in config.json, such as "BertModel"."""
        value = self.config.get("architectures", None) or ()
        return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list | tuple) else ()

    @property
    def model_type(self) -> str:
        return self.config.text("model_type", "")

    def _required(self, name: str) -> dict[str, Any]:
        values = self.json_object(name)
        if values is None:
            raise ImportFailedError(
                f"{self.path} has no {name}; it must be a folder of Hugging Face with {CONFIG}, {SAFETENSORS} and "
                "tokenizer files"
            )
        return values

    def _transformer_module(self) -> str:
        """Return the folder of the Transformer with a slash, or "" if it is this folder itself.

        Older folders of sentence-transformers have it in a subfolder that modules.json names.
        """
        if self.has(CONFIG):
            return ""
        modules = self.json("modules.json")
        first = modules[0] if isinstance(modules, list) and modules else None
        path = first.get("path") if isinstance(first, dict) else None
        return f"{path}/" if isinstance(path, str) and path else ""

    def open_tensors(self, folder: str) -> Tensors:
        """Open the weights of a module.

        `folder` is relative and ends with a slash, or is "" for this folder itself.
        """
        shards, listed = self._shards(folder, SAFETENSORS, SAFETENSORS_INDEX)
        is_pickle = not shards
        if is_pickle:
            shards, listed = self._shards(folder, PICKLE, PICKLE_INDEX)
        if not shards:
            raise ImportFailedError(no_weights(str(self.path / folder), self.names(folder)))
        stored: dict[str, StoredTensor] = {}
        for file in shards:
            name = folder + file
            path = self.locate(name)
            if path is None:
                raise ImportFailedError(
                    f"{self.path / name} is missing, but the index of weights names it; download it"
                )
            reader: Reader = (PickleFile if is_pickle else SafetensorsFile)(path, str(self.path / name))
            self.files[name] = sha256_of(self.path / name)
            stored |= stored_tensors(reader)
        if listed and listed != stored.keys():
            raise ImportFailedError(
                f"{', '.join(shards)} and the index of weights do not list the same tensors: "
                f"{first_of(listed ^ stored.keys())}; download the checkpoint again"
            )
        self.is_pickle = self.is_pickle or is_pickle
        return Tensors(stored)

    def _shards(self, folder: str, single: str, index: str) -> tuple[list[str], set[str]]:
        """Return the weight files, if there are any, and the tensors that an index lists."""
        if self.has(folder + single):
            return [single], set()
        if not self.has(folder + index):
            return [], set()
        weight_map = self._required(folder + index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ImportFailedError(f"{self.path / folder / index} has no weight_map; download it again")
        for file in weight_map.values():
            if not isinstance(file, str) or file in (".", "..") or "/" in file or "\\" in file or not file:
                raise ImportFailedError(
                    f"{self.path / folder / index} names the file {_shown(file)}; weights must be in the same folder"
                )
        return sorted(set(weight_map.values())), set(weight_map)


def _checked(name: str) -> str:
    """Return a relative name; an absolute one, or one with "..", is refused."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ImportFailedError(f"a configuration file names the path {_shown(name)}, which leaves its folder")
    return name


def no_weights(place: str, names: Iterable[str]) -> str:
    """Return the error for a folder or a repository whose files have no weights that are read."""
    others = [name for name in names if name.endswith(OTHER_WEIGHTS)]
    reason = f"and {first_of(others)} is not read; name the file if it is GGUF, or {CONVERT}"
    reason = reason if others else "so it has no weights"
    return f"{place} has neither {SAFETENSORS} nor {PICKLE}, {reason}"


def detect_kind(path: Path) -> Kind:
    """Recognise the kind of a GGUF file, or of a folder by its files.

    A missing path, or a file of another kind, raises `UsageError`; a folder of no known kind
    `ImportFailedError`, whose message names the contents.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist; name the folder of a checkpoint")
    if path.suffix == ".gguf" and path.is_file():
        return "gguf"
    if not path.is_dir():
        raise UsageError(f"{path} is a file; name the folder of a checkpoint, or a file that ends in .gguf")
    names = {entry.name for entry in path.iterdir()}
    if "weights.safetensors" in names and "config.json" in names:
        return "training"
    if "config.json" in names or "modules.json" in names:
        return "huggingface"
    if any(re.fullmatch(r"model\..*\.bin(\.gz)?", name) for name in names):
        return "firefox"
    raise ImportFailedError(
        f"{path} is not a checkpoint: it has neither config.json (Hugging Face or a training run) nor a file such as "
        "model.ende.intgemm.alphas.bin (Firefox); name the folder that has it, or a GGUF file instead of its folder"
    )


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub stores downloads."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
