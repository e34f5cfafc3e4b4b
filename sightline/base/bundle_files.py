"""Files of bundles: reading, writing, and checking them against the manifest."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader
from pathlib import Path

from pydantic import ValidationError

from sightline.base.bundle import MANIFEST, SCHEMA_VERSION, BundleError, FileRecord, Manifest, MissingBundleError
from sightline.base.errors import did_you_mean, list_of
from sightline.base.external_data import ExternalTensor, are_finite, external_tensors


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a bundle without following symbolic links, and without blocking on a FIFO.

    Raises `FileNotFoundError`, or `BundleError` if the file cannot be opened, is not a regular
    file, or has several hard links, so that it could be changed under another name, or if its
    content raises `ValueError`.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise BundleError(f"{path} cannot be opened: {reason}; it must be a readable regular file") from None
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is not a regular file")
        if status.st_nlink != 1:
            raise BundleError(
                f"{path} has {status.st_nlink} hard links; a file of a bundle must have exactly one; copy it"
            )
        try:
            yield file
        except (RecursionError, ValueError) as error:
            raise BundleError(f"{path} cannot be used: {error}") from None


def read_manifest(folder: Path) -> Manifest:
    """Read and validate `manifest.json`; the files that it lists are not opened.

    Raises `BundleError`, also if the schema version is not supported.
    """
    path = folder / MANIFEST
    try:
        with _open_regular(path) as file:
            return _parsed_manifest(file.read(), path)
    except FileNotFoundError:
        raise MissingBundleError(f"{folder} is not a bundle: it has no {MANIFEST}{_similar_bundle(folder)}") from None


@lru_cache(maxsize=128)  # a service reads those of its folder again for each model that it loads
def _parsed_manifest(data: bytes, path: Path) -> Manifest:
    # The version is checked before the fields: a manifest of another version may have other fields.
    document = json.loads(data.decode())
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema_version {version!r}, this service needs {SCHEMA_VERSION}; export the bundle again"
        )
    # Bundles of version 0.4 and before have a graph that compares tokens, which nothing runs.
    tasks = document.get("tasks")
    if document.pop("similar", None) is not None and isinstance(tasks, list):
        document["tasks"] = [task for task in tasks if task != "similar"]
    try:
        return Manifest.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path}: {where}: {first['msg']}; export the model again") from None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check all files of a bundle: regular files, matching SHA-256, finite weights.

    Every file that the service or ONNX Runtime would open must be listed in the manifest: graphs,
    layers after pooling, tokenizers and the external data of graphs. Raises `BundleError`, which
    names the file.
    """
    dense = () if manifest.embedding is None else manifest.embedding.dense
    files = [*(graph.file for graph in manifest.graphs), *(layer.file for layer in dense)]
    _check_listed(folder, manifest, [*files, manifest.source_tokenizer, manifest.target_tokenizer])
    for name in manifest.files:
        check_file(folder, manifest, name)
    tensors = set[ExternalTensor]()
    for graph in manifest.graphs:
        with _open_regular(folder / graph.file) as file:
            tensors |= external_tensors(file.read())
    external = sorted({tensor.file for tensor in tensors})
    _check_listed(folder, manifest, external)
    for path in (folder / name for name in external):
        with _open_regular(path):
            is_finite = are_finite(path, [tensor for tensor in tensors if tensor.file == path.name])
        if not is_finite:
            raise BundleError(f"{path} has weights that are not finite numbers; export the bundle again")


def _check_listed(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        if name not in manifest.files:
            raise BundleError(
                f"{folder / MANIFEST} does not list {name!r}, which the bundle uses; export the bundle again"
            )


def check_file(folder: Path, manifest: Manifest, name: str) -> None:
    """Check the SHA-256 of one file of a bundle. Raises `BundleError`, which names it."""
    _check_listed(folder, manifest, [name])
    path, record = folder / name, manifest.files[name]
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            is_same = size == record.bytes and hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from None
    if not is_same:
        raise BundleError(f"{path} does not match the SHA-256 in the manifest; copy or export the bundle again")


def read_bundle(folder: Path) -> Manifest:
    """Read the manifest of a bundle and check all its files. Raises `BundleError`."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Return the size and SHA-256 of files in a folder, as `Manifest.files` holds them."""
    return {name: FileRecord(sha256=sha256_of(folder / name), bytes=(folder / name).stat().st_size) for name in names}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _similar_bundle(folder: Path) -> str:
    """Return the end of a message about a folder that is no bundle: a similar one, or those that
    exist beside it and in `bundles`.
    """
    parents = dict.fromkeys((folder.parent, Path("bundles")))
    present = [path.parent for parent in parents for path in sorted(parent.glob(f"*/{MANIFEST}"))]
    for path in present:
        if path.name == folder.name:
            return f" (did you mean {path}?)"
    paths = list(map(str, present))
    return did_you_mean(str(folder), paths) or (f"; bundles are {list_of(paths)}" if paths else "")
