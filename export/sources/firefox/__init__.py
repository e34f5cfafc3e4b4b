"""Firefox translation models: folders with a Marian model, vocabularies and a shortlist."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.firefox.marian_binary import read_file
from sightline.export.sources.opened_checkpoint import FolderFiles

MODEL = re.compile(r"model\.([a-z]+)\.intgemm(8|\.alphas)\.bin(\.gz)?")
SHORTLIST_FILE = "lex.50.50.{}.s2t.bin"
METADATA = "metadata.json"
Language = Annotated[str, Field(pattern=r"^[a-z]{2,3}(-[A-Za-z0-9]{2,8})*$")]  # BCP 47


@dataclass(frozen=True)
class FirefoxFiles:
    """Files of a model; each may end in `.gz`."""

    languages: str  # source and target without a separator, such as "ende"
    model: Path
    source_vocabulary: Path
    target_vocabulary: Path  # the same file if both languages share a vocabulary
    shortlist: Path | None

    @property
    def paths(self) -> tuple[Path, ...]:
        vocabularies = dict.fromkeys((self.source_vocabulary, self.target_vocabulary))
        return self.model, *vocabularies, *([self.shortlist] if self.shortlist else [])

    @property
    def source_and_target(self) -> tuple[str, str] | None:
        """Codes of the languages, or None if it is not clear where the first one ends."""
        middle = len(self.languages) // 2
        if len(self.languages) not in (4, 6):
            return None
        return self.languages[:middle], self.languages[middle:]


class PublishedJson(BaseModel):
    """JSON that Mozilla publishes; other fields are not read."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True)


class PublishedMetadata(PublishedJson):
    """Content of `metadata.json`, which may lack any of it."""

    source_language: Language | None = None
    target_language: Language | None = None
    architecture: str | None = None  # "tiny", "base" or "base-memory"
    version: str | None = None
    hash: str | None = None  # SHA-256 of the unpacked model


@dataclass(frozen=True)
class Metadata:
    """Facts that `metadata.json` states about a model."""

    languages: tuple[str, str] | None = None  # BCP 47 tags of source and target
    architecture: str = "firefox"  # with the size of the model, such as "firefox-tiny"
    description: str = ""


def find_firefox_files(folder: Path) -> FirefoxFiles:
    """Find the files of a model by the names under which Mozilla publishes them.

    A file is preferred to the same file with `.gz`, and `.alphas.bin` to `.intgemm8.bin`. Models of
    several language pairs are an error.
    """
    matches = [match for path in sorted(folder.iterdir()) if (match := MODEL.fullmatch(path.name))]
    pairs = sorted({match[1] for match in matches})
    if len(pairs) != 1:
        models = f"models of {len(pairs)} language pairs: {', '.join(pairs)}" if pairs else "none"
        raise ImportFailedError(
            f"{folder} must have one model.XXYY.intgemm.alphas.bin or .intgemm8.bin, it has {models}; give each model "
            "a folder of its own"
        )
    pair = pairs[0]
    model = _first(folder, [f"model.{pair}.intgemm.alphas.bin", f"model.{pair}.intgemm8.bin"])
    shared = _first(folder, [f"vocab.{pair}.spm"])
    source = shared or _first(folder, [f"srcvocab.{pair}.spm"])
    target = shared or _first(folder, [f"trgvocab.{pair}.spm"])
    assert model is not None
    if source is None or target is None:
        raise ImportFailedError(
            f"{folder} has no vocab.{pair}.spm, and not both srcvocab.{pair}.spm and trgvocab.{pair}.spm; download "
            "them to the folder"
        )
    return FirefoxFiles(pair, model, source, target, _first(folder, [SHORTLIST_FILE.format(pair)]))


def read_metadata(folder: FolderFiles, files: FirefoxFiles) -> Metadata:
    """Read `metadata.json`, if the folder has it, and check that it belongs to the model."""
    path, data = folder.path / METADATA, folder.bytes(METADATA)
    try:
        given = PublishedMetadata.model_validate_json(data or b"{}")
    except ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{part}: " for part in problem["loc"])
        raise ImportFailedError(f"{path}: {where}{problem['msg']}; download it again, or remove it") from None
    languages = None
    if given.source_language and given.target_language:
        languages = given.source_language, given.target_language
        names = [(tag.partition("-")[0], re.sub("[^a-z]", "", tag.lower())) for tag in languages]
        if files.languages not in {source + target for source, target in product(*names)}:
            raise ImportFailedError(
                f"{path} has the languages {languages[0]} and {languages[1]}, but {files.model.name} has "
                f"{files.languages!r}; they belong to different models: download both again, or remove {METADATA}"
            )
    if given.hash is not None and given.hash != hashlib.sha256(read_file(files.model)).hexdigest():
        raise ImportFailedError(
            f"{path} belongs to another version of the model: its hash is not the SHA-256 of {files.model.name}; "
            f"download both again, or remove {METADATA}"
        )
    details = [" to ".join(languages or ()), given.architecture or "", given.version and f"version {given.version}"]
    known = ", ".join(filter(None, details))
    return Metadata(
        languages,
        f"firefox-{given.architecture}" if given.architecture else "firefox",
        f"Firefox translation model: {known}" if known else "",
    )


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first of some files that exists, with or without `.gz`."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)
