"""Discovery of the bundles in a folder. It reads their manifests and needs no ONNX Runtime."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sightline.base.bundle import MANIFEST, BundleError, Manifest, MissingBundleError
from sightline.base.bundle_files import check_files, read_manifest
from sightline.base.errors import did_you_mean, list_of

DEFAULT_MODELS = "default_models.txt"  # in a folder of bundles; `sightline models default` writes it
logger = logging.getLogger(__name__)

OnFailure = Callable[[Path, BundleError], None]  # takes the folder of a bundle and the reason


def raise_failure(folder: Path, error: BundleError) -> None:
    raise error


def find_bundles(
    folder: Path, default_models: Sequence[str] = (), on_failure: OnFailure = raise_failure, only: Sequence[str] = ()
) -> dict[Path, Manifest]:
    """Find the bundles in a folder, and return their manifests by bundle folder in sorted order.

    Other files than the manifests are opened only if two bundles have the same name: then the first
    that is not damaged is found. `on_failure` is called for each bundle whose manifest cannot be
    used; it raises by default. `only` names the subfolders to read, by default all. Raises
    `BundleError` if the folder cannot be listed, has no bundles, or lacks a default model.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if not only or path.name in only)
    except (FileNotFoundError, NotADirectoryError):
        message = f"there is no folder {folder} with bundles; set SIGHTLINE_BUNDLES or --bundles"
        raise MissingBundleError(message) from None
    except OSError as error:
        raise BundleError(f"{folder} cannot be listed: {error.strerror}; {_permissions_needed()}") from None
    bundles: dict[Path, Manifest] = {}
    folders: dict[str, Path] = {}  # by the name of the model
    num_failed = 0
    for path in paths:
        try:
            if not _is_bundle(path):
                continue
            manifest = read_manifest(path)
            first = folders.get(manifest.name)
            if first is not None and not _is_damaged(first, bundles[first], on_failure):
                raise BundleError(
                    f"two bundles in {folder} are named {manifest.name}: {first.name} and {path.name}; remove one of "
                    "them, because requests choose models by name"
                )
            if first is not None:
                num_failed += 1
                del bundles[first]
        except BundleError as error:
            num_failed += 1
            on_failure(path, error)
        else:
            bundles[path] = manifest
            folders[manifest.name] = path
    if not bundles and not num_failed:
        raise MissingBundleError(
            f"no folder in {folder} has a {MANIFEST}; `sightline models get` downloads bundles, and `sightline export` "
            "writes them"
        )
    for name in default_models:
        if name not in folders:
            present = list_of(folders) or "no bundle that can be read"
            way = "set SIGHTLINE_DEFAULT_MODEL or --default-model to a model of the folder, or to nothing"
            if read_default_models(folder) == tuple(default_models):
                way = f"change {folder / DEFAULT_MODELS} with `sightline models default`"
            reason = f"is not in {folder}{did_you_mean(name, folders)}, which has {present}"
            raise MissingBundleError(f"the default model {name} {reason}; {way}")
    return bundles


def read_default_models(folder: Path) -> tuple[str, ...]:
    """Return the default models that a folder of bundles names, one a line, in order.

    Raises `BundleError` if the file cannot be read.
    """
    path = folder / DEFAULT_MODELS
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BundleError(
            f"{path} cannot be read: {reason}; write it again with `sightline models default`, or remove it"
        ) from None
    return tuple(dict.fromkeys(name for line in lines if (name := line.partition("#")[0].strip())))


def _is_damaged(path: Path, manifest: Manifest, on_failure: OnFailure) -> bool:
    """Return True, and report the bundle, if its files are not those of its manifest."""
    try:
        check_files(path, manifest)
    except BundleError as error:
        on_failure(path, error)
        return True
    return False


def _is_bundle(path: Path) -> bool:
    """Return True for a folder with a manifest that is not hidden.

    Raises `BundleError` if the folder cannot be entered.
    """
    try:
        (path / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if path.name.startswith("."):
            return False
        raise BundleError(f"{path} cannot be entered: {error.strerror}; {_permissions_needed()}, or move it") from None
    if path.name.startswith("."):
        logger.warning(
            "%s is hidden and not served: an interrupted export leaves such a folder, and the next export to the same "
            "folder removes or restores it",
            path,
        )
        return False
    return True


def _permissions_needed() -> str:
    return f"give user {os.geteuid()}, which runs the service, permission to read and enter it"
