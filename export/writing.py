"""Files of a bundle: their names, and the replacement of an existing bundle by a new one."""

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from sightline.base.bundle import MANIFEST, BundleError, Graph
from sightline.base.bundle_files import read_manifest
from sightline.base.errors import UsageError
from sightline.export.import_errors import ImportFailedError

# Graphs by fields of the manifest.
GRAPH_FILES = {
    "encoder": "encoder.onnx", "decoder": "step.onnx", "predict": "predict.onnx", "contributions": "contributions.onnx",
}  # fmt: skip
ROWS, WEIGHTS = "rows.onnx", "weights.bin"
TOKENIZER, TARGET_TOKENIZER, PROMPT_TOKENIZER = "tokenizer.json", "target_tokenizer.json", "prompt_tokenizer.json"


def graph_entry(name: str, proto: onnx.ModelProto) -> Graph:
    inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
    return Graph(file=name, inputs=tuple(inputs), outputs=tuple(outputs))


def write_graphs(folder: Path, graphs: Mapping[str, Any]) -> dict[str, Graph]:
    """Write the graphs at the fields of the manifest, and return the entries of these fields."""
    entries = {}
    for field, name in GRAPH_FILES.items():
        if graphs.get(field) is not None:
            onnx.save_model(graphs[field], folder / name)
            entries[field] = graph_entry(name, graphs[field])
    return entries


def _files_to_keep(bundle: Path) -> list[Path]:
    """List files of an existing folder that its manifest does not list, such as a model card."""
    if not bundle.exists():
        return []
    if not bundle.is_dir() or any(path.is_dir() for path in bundle.iterdir()):
        raise UsageError(f"{bundle} exists and is not a bundle: it must be a folder without subfolders")
    try:
        own = {MANIFEST, *read_manifest(bundle).files}
    except BundleError:
        own = {MANIFEST}
    return [path for path in bundle.iterdir() if path.name not in own]


@contextmanager
def replacing(bundle: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces the bundle on success.

    Files of the old folder that its manifest does not list are copied.
    """
    bundle = bundle.resolve()
    clean_up(bundle)
    kept = _files_to_keep(bundle)
    with temporary_sibling(bundle, "new") as folder:
        yield folder
        for path in kept:
            if not (folder / path.name).exists():
                shutil.copy2(path, folder)
        _replace(bundle, folder)


def clean_up(bundle: Path) -> None:
    """Remove or restore the folders that an interrupted export left beside a bundle.

    `.NAME.new` is an unfinished bundle and is removed. `.NAME.old` is the previous bundle. It is
    restored if the export ended before the new bundle was in place, and removed otherwise.
    """
    bundle = bundle.resolve()
    shutil.rmtree(_sibling(bundle, "new"), ignore_errors=True)
    old = _sibling(bundle, "old")
    if old.exists() and not bundle.exists():
        old.rename(bundle)
    shutil.rmtree(old, ignore_errors=True)


def _sibling(bundle: Path, suffix: str) -> Path:
    """Return the path of a hidden folder beside the bundle; the service ignores hidden folders."""
    return bundle.with_name(f".{bundle.name}.{suffix}")


@contextmanager
def temporary_sibling(bundle: Path, suffix: str) -> Iterator[Path]:
    """Yield an empty folder beside the bundle, which is removed at the end unless it was moved.

    The folder of an interrupted call is removed first.
    """
    folder = _sibling(bundle.resolve(), suffix)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(bundle: Path, folder: Path) -> None:
    if not bundle.exists():
        folder.rename(bundle)
        return
    old = _sibling(bundle, "old")
    bundle.rename(old)
    try:
        folder.rename(bundle)
    except BaseException:
        old.rename(bundle)
        raise
    shutil.rmtree(old)


@contextmanager
def clear_disk_errors(bundle: Path) -> Iterator[None]:
    """Convert the errors of a full disk, which do not name the file, to one with the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ImportFailedError(
            f"{bundle} cannot be written: {error.strerror}; remove files, or choose another --out; no incomplete "
            "bundle is left"
        ) from None
