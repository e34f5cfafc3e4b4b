"""Firefox translation models that Mozilla publishes: their list, and downloads.

The list is a collection of records of Mozilla's Remote Settings, one for each file. The root of
that server names the address of the files, which are compressed with zstd.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import urljoin

from packaging.version import InvalidVersion, Version
from pydantic import Field, ValidationError

from sightline.base.bundle_files import sha256_of
from sightline.base.errors import UsageError, did_you_mean
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.download import Download, UnreachableError
from sightline.export.sources.firefox import METADATA, Language, PublishedJson, PublishedMetadata
from sightline.export.sources.opened_checkpoint import Provenance

PREFIX = "firefox:"  # of the names of models, such as firefox:en-de
VARIABLE = "FIREFOX_MODELS_ENDPOINT"  # environment variable of the address
SERVER = "https://firefox.settings.services.mozilla.com/v1"
RECORDS = "buckets/main/collections/translations-models-v2/records"
LICENSE = "MPL-2.0"
TYPES = {"model", "lex", "vocab", "srcvocab", "trgvocab"}  # of files
SIZES = ("tiny", "base", "base-memory")  # from the least to the most preferred of the same version
MAX_FILE_BYTES = 1 << 30
MAX_WINDOW = 1 << 27  # bytes of memory that a compressed file may ask for
BLOCK = 1 << 20
TIMEOUT_S = 30

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]


class Attachment(PublishedJson):
    """A file as it is transferred."""

    hash: Digest
    size: Size
    filename: str
    location: str


class Record(PublishedJson):
    """A file of a model; other fields of the list are not read."""

    name: Annotated[str, Field(pattern=r"^(model|lex|vocab|srcvocab|trgvocab)\.[A-Za-z0-9.]+$")]
    version: str
    file_type: str
    attachment: Attachment
    architecture: str = ""
    source_language: Language
    target_language: Language
    decompressed_hash: Digest | None = None  # of the unpacked file; None if it is not compressed
    decompressed_size: Size | None = None
    modified: int = Field(default=0, alias="last_modified")


@dataclass(frozen=True)
class PublishedModel:
    """A version of a model."""

    source: str
    target: str
    architecture: str
    version: Version
    files: dict[str, Record] = field(default_factory=dict)  # by type

    @property
    def pair(self) -> str:
        return f"{self.source}-{self.target}"

    @property
    def num_bytes(self) -> int:
        return sum(record.attachment.size for record in self.files.values())

    @property
    def is_complete(self) -> bool:
        types = self.files.keys()
        return {"model", "vocab"} <= types or {"model", "srcvocab", "trgvocab"} <= types

    @property
    def rank(self) -> tuple[Any, ...]:
        """Return the order of versions: a release is preferred to a version that is being tried."""
        size = SIZES.index(self.architecture) if self.architecture in SIZES else -1
        return not self.version.is_prerelease, self.version, size


def server() -> str:
    return (os.environ.get(VARIABLE) or SERVER).rstrip("/")


def published_models() -> dict[str, PublishedModel]:
    """Return the newest complete version of each model by its pair of languages, sorted.

    Raises `ImportFailedError` if the list cannot be read.
    """
    document = _get_json(f"{server()}/{RECORDS}")
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise ImportFailedError(f"{server()}/{RECORDS} has no list of models; check {VARIABLE}")
    models: dict[tuple[str, ...], PublishedModel] = {}
    for row in rows:
        if not isinstance(row, dict) or row.get("fileType") not in TYPES:
            continue  # files that the import does not read
        try:
            record = Record.model_validate(row)
            version = Version(record.version)
        except (ValidationError, InvalidVersion):
            continue  # of an older form, or of one that is not known yet
        key = (record.source_language, record.target_language, record.architecture)
        model = models.setdefault((*key, record.version), PublishedModel(*key, version))
        known = model.files.get(record.file_type)
        if known is None or known.modified < record.modified:
            model.files[record.file_type] = record
    newest: dict[str, PublishedModel] = {}
    for model in models.values():
        if model.is_complete and (model.pair not in newest or newest[model.pair].rank < model.rank):
            newest[model.pair] = model
    if not newest:
        raise ImportFailedError(f"{server()}/{RECORDS} has no model that can be imported; check {VARIABLE}")
    return dict(sorted(newest.items()))


def find_model(pair: str, models: Mapping[str, PublishedModel]) -> PublishedModel:
    """Return the model of a pair such as "en-de". Raises `UsageError` if there is none."""
    found = {name.lower(): model for name, model in models.items()}.get(pair.replace("_", "-").lower())
    if found is None:
        source, _, target = pair.partition("-")
        steps = [name for name in (f"{source}-en", f"en-{target}") if name in models]
        advice = f"; {' and '.join(PREFIX + step for step in steps)} translate by way of English" if steps[1:] else ""
        raise UsageError(
            f"there is no Firefox model for {pair}{did_you_mean(pair, models)}{advice}; `sightline models list "
            "firefox` has the pairs"
        )
    return found


@contextmanager
def downloaded_model(model: PublishedModel) -> Iterator[Download]:
    """Yield a folder with the unpacked files of a model, whose hashes were checked.

    The compressed files stay in the folder of huggingface_hub (`HF_HOME`), beside its cache.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HOME, "firefox-models")
    cache.mkdir(parents=True, exist_ok=True)
    root = _get_json(f"{server()}/")
    attachments = root.get("capabilities", {}).get("attachments", {}) if isinstance(root, dict) else {}
    base = urljoin(f"{server()}/", str(attachments.get("base_url") or f"{server()}/"))
    with TemporaryDirectory(prefix="sightline-") as temporary:
        folder = Path(temporary)
        for record in model.files.values():
            _unpack(_fetch(urljoin(base, record.attachment.location), record.attachment, cache), record, folder)
        weights = model.files["model"]
        metadata = PublishedMetadata(
            source_language=model.source,
            target_language=model.target,
            architecture=model.architecture or None,
            version=weights.version,
            hash=weights.decompressed_hash or weights.attachment.hash,
        )
        (folder / METADATA).write_text(metadata.model_dump_json(by_alias=True), encoding="utf-8")
        yield Download(folder, Provenance(PREFIX + model.pair, weights.version), LICENSE)


def _get_json(url: str) -> Any:
    import httpx2

    try:
        return httpx2.get(url, follow_redirects=True, timeout=TIMEOUT_S).raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UnreachableError(_unreachable(url, error)) from None
    except (ValueError, RecursionError) as error:
        raise ImportFailedError(f"{url} is not the JSON of Remote Settings ({error}); check {VARIABLE}") from None


def _unreachable(url: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = f"answered {status}" if status else f"cannot be reached ({type(error).__name__})"
    return (
        f"{url} {reason}; check the network, or set {VARIABLE} to a mirror of {SERVER}; the same command continues a "
        "download"
    )


def _fetch(url: str, attachment: Attachment, cache: Path) -> Path:
    """Return the file of an attachment in the cache, after downloading what is missing."""
    import httpx2
    from huggingface_hub.file_download import http_get

    whole, part = cache / attachment.hash, cache / f"{attachment.hash}.part"
    if whole.is_file() and sha256_of(whole) == attachment.hash:
        return whole
    # Compressed bytes are counted and hashed, so the server must not compress them again.
    options: dict[str, Any] = {"headers": {"Accept-Encoding": "identity"}, "expected_size": attachment.size}
    try:
        with part.open("ab") as file:
            http_get(url, file, resume_size=file.tell(), displayed_filename=attachment.filename, **options)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UnreachableError(_unreachable(url, error)) from None
    except OSError as error:
        if error.errno is not None:  # none for a file of another size
            raise
    if sha256_of(part) != attachment.hash:
        part.unlink()
        raise ImportFailedError(f"{url} has another size or SHA-256 than the list of models states; it is not used")
    part.replace(whole)
    return whole


def _unpack(path: Path, record: Record, folder: Path) -> None:
    """Write the content of a downloaded file to a folder, and check its hash."""
    import zstandard

    target = folder / record.name
    if record.decompressed_hash is None:
        shutil.copyfile(path, target)
        return
    size = record.decompressed_size or MAX_FILE_BYTES
    try:
        with (
            path.open("rb") as file,
            target.open("xb") as out,
            zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(file) as unpacked,
        ):
            while (block := unpacked.read(BLOCK)) and out.tell() <= size:
                out.write(block)
    except zstandard.ZstdError as error:
        raise ImportFailedError(f"{record.name} of the list of models cannot be unpacked: {error}") from None
    if target.stat().st_size > size or sha256_of(target) != record.decompressed_hash:
        raise ImportFailedError(
            f"{record.name} has another size or SHA-256 after unpacking than the list of models states; it is not used"
        )
