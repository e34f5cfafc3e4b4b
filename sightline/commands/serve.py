"""`sightline serve`: import the named models that are missing, and serve bundles over HTTP."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sightline.base.bundle import MANIFEST, BundleError, MissingBundleError
from sightline.base.bundle_files import read_manifest, sha256_of
from sightline.base.errors import EXIT_USAGE, UsageError, did_you_mean, fail
from sightline.base.options import Options, Shown, add_options
from sightline.base.parser import Parser
from sightline.commands.bundles import bundle_name
from sightline.service.__main__ import main
from sightline.service.discovery import find_bundles
from sightline.service.settings import Settings

WAYS = """\
{}. There are three ways to get a model:
  sightline serve minilm      imports a model of the catalogue, minilm or smollm2, and serves it
  sightline serve OWNER/NAME  does so with a repository of a Hugging Face hub, a folder or a GGUF file
  sightline serve RUN         does so with a training: sightline train translation DATA --run RUN"""
logger = logging.getLogger(__name__)


class ServeOptions(Options):
    """Options of `sightline serve` beside the settings of the service."""

    models: Annotated[tuple[str, ...], Shown("MODEL", is_positional=True)] = ()
    """Models to serve, and no others: bundles of the folder by name, names of the catalogue,
    OWNER/NAME or OWNER/NAME@REVISION of a Hugging Face hub, folders of a bundle or a checkpoint,
    GGUF files. What the folder lacks is imported into it first, which needs the extra `import`.
    Default: all bundles of the folder."""


@dataclass(frozen=True)
class Source:
    """A model that the user names."""

    word: str
    name: str  # of the folder of its bundle
    command: tuple[str, ...] = ()  # the command of `sightline` that imports it; () if it is a bundle
    bundle: Path | None = None  # where it is, unless in the folder of bundles


def run(parser: Parser, words: Sequence[str]) -> int:
    parser.usage = "%(prog)s [MODEL ...] [OPTION ...]"
    add_options(parser, ServeOptions, ["models"])
    return main(words, parser, prepare)


def prepare(settings: Settings, flags: Mapping[str, Any]) -> Settings:
    """Import the named models that are missing; return the settings that serve only these models.

    The process ends if a model cannot be imported, or if there is nothing to serve.
    """
    words: Sequence[str] = flags.get("models", ())
    try:
        if words:
            only = provide(words, settings.bundles)
            names = {found.name for found in find_bundles(settings.bundles, (), lambda *_: None, only).values()}
            defaults = tuple(name for name in settings.folder_default_models if name in names)
            return settings.model_copy(update={"only": only, "folder_default_models": defaults})
        find_bundles(settings.bundles, on_failure=lambda *_: None)
    except (OSError, UsageError) as error:
        text = str(error)
        if isinstance(error, MissingBundleError):
            text = WAYS.format(text.partition(";")[0])
        elif isinstance(error, OSError):
            advice = f"user {os.geteuid()} must be able to write to {settings.bundles}"
            text = f"{error.filename}: {error.strerror}; {advice}"
        raise SystemExit(fail(text, EXIT_USAGE)) from None
    except BundleError:
        pass  # the service reports it
    return settings


def provide(words: Sequence[str], bundles: Path) -> tuple[str, ...]:
    """Import the models that a folder of bundles lacks; return the names of their subfolders.

    Raises `UsageError` if a word names no model, or its bundle has the name of another one. The
    process ends with the status of an import that fails.
    """
    present: dict[str, str] = {}  # subfolders by the names of their models
    with suppress(BundleError):
        manifests = find_bundles(bundles, on_failure=lambda *_: None)
        present = {manifest.name: folder.name for folder, manifest in manifests.items()}
    sources: dict[str, Source] = {}
    for word in dict.fromkeys(words):
        source = find_source(word, bundles, present)
        folder, other = bundles / source.name, sources.setdefault(source.name, source)
        if (other.command, other.bundle) != (source.command, source.bundle) or _differs(source, folder):
            rival = "which is another bundle" if other is source else f"the bundle of {other.word}"
            way = " ".join(["sightline", *source.command, f"--out {bundles}/OTHER and sightline serve OTHER"])
            raise UsageError(
                f"the bundle of {word} would replace {folder}, {rival}; serve it as another one: "
                f"{way if source.command else f'sightline serve --bundles {Path(word).resolve().parent}'}"
            )
    for name, source in sources.items():
        folder = bundles / name
        if (folder / MANIFEST).exists():
            logger.info("%s is there, and is not imported again", folder)
        elif source.bundle is not None:
            bundles.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(source.bundle)
            logger.info("%s is now a link to %s", folder, source.bundle)
        else:
            from sightline.export.limits import run_limited
            from sightline.export.writing import temporary_sibling

            logger.info("importing %s to %s", source.word, folder)
            with temporary_sibling(folder, "import") as temporary:  # /tmp of a container is small
                status = run_limited("sightline", [*source.command, "--out", str(folder)], temporary=temporary)
            if status:
                raise SystemExit(status)
    return tuple(sources)


def find_source(word: str, bundles: Path, present: Mapping[str, str]) -> Source:
    """Return the model that a word names: a bundle of the folder, or where to import it from.

    Raises `UsageError` if it names none.
    """
    path = Path(word).expanduser()
    if word == path.name and (word in present or (bundles / word / MANIFEST).exists()):
        return Source(word, present.get(word, word))
    from sightline.export.sources.catalogue import CATALOGUE
    from sightline.export.sources.firefox.published import PREFIX

    if word and word not in CATALOGUE and path.exists():
        resolved = path.resolve()
        if (path / MANIFEST).exists():
            return Source(word, resolved.name, bundle=None if resolved.parent == bundles.resolve() else resolved)
        if any(path.glob(f"*/{MANIFEST}")):
            raise UsageError(f"{word} is a folder of bundles; serve it with --bundles {word}")
        name = resolved.stem if resolved.suffix == ".gguf" else resolved.name
        return Source(word, name, ("export", str(path)))
    is_published = word in CATALOGUE or word.startswith(PREFIX)
    if not is_published and (word.count("/") != 1 or word[0] in "./~" or path.suffix == ".gguf"):
        raise UsageError(
            f"{word} is neither a file or folder, nor a bundle in {bundles}, nor a name of the catalogue "
            f"({', '.join(CATALOGUE)}), nor OWNER/NAME of a hub{did_you_mean(word, [*present, *CATALOGUE])}"
        )
    return Source(word, bundle_name(word), ("models", "get", word))


def _differs(source: Source, folder: Path) -> bool:
    """Return True if the folder has a bundle that is known not to be that of a source."""
    if source.bundle is not None:
        return folder.exists() and folder.resolve() != source.bundle
    try:
        origin = read_manifest(folder).origin
    except BundleError:  # the service reports it
        return False
    if "models" in source.command and ("/" in source.word or ":" in source.word):
        return origin is None or (origin.repository or "").lower() != source.word.partition("@")[0].lower()
    if "export" not in source.command or origin is None:
        return False
    path = Path(source.command[1])
    if path.is_file():
        return origin.files.get(path.name) != sha256_of(path)
    return any((path / name).is_file() and sha256_of(path / name) != digest for name, digest in origin.files.items())
