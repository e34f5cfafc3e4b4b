"""`sightline models`: list the bundles of a folder."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from service.bundle import BundleError, Manifest
from service.discovery import find_bundles
from service.settings import SettingsError, add_flags, make_settings
from sightline.parser import EXIT_USAGE, Parser


@dataclass(frozen=True)
class Listing:
    """A bundle as it is listed."""

    name: str
    task: str
    bytes: int  # size of all files
    parameters: int
    precision: str
    languages: tuple[str, str] | None  # source and target, as ISO 639-1 codes
    folder: str
    description: str


def run(parser: Parser, arguments: Sequence[str]) -> int:
    """Print the bundles of a folder as a table or as JSON, and return the exit code."""
    parser.description = "List the bundles of a folder: name, task, size, precision and languages."
    parser.epilog = "example: %(prog)s --bundles bundles --json"
    add_flags(parser, ["bundles"])
    parser.add_argument("--json", action="store_true", help="Print a JSON list instead of a table.")
    parsed = parser.parse_args(arguments)
    problems: list[str] = []

    def on_failure(folder: Path, error: BundleError) -> None:
        problems.append(str(error))

    try:
        found = find_bundles(make_settings({"bundles": parsed.bundles}).bundles, None, on_failure)
    except (BundleError, SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    listings = [listing_of(folder, manifest) for folder, manifest in found.items()]
    if parsed.json:
        print(json.dumps([asdict(one) for one in listings], indent=2, ensure_ascii=False))
    elif listings:
        print_table(listings)
    sys.stdout.flush()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_USAGE if problems else 0


def listing_of(folder: Path, manifest: Manifest) -> Listing:
    languages = manifest.languages
    return Listing(
        manifest.name,
        task_of(manifest),
        sum(record.bytes for record in manifest.files.values()),
        manifest.parameters,
        manifest.dtype,
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
    rows = [("NAME", "TASK", "SIZE", "PRECISION", "LANGUAGES")]
    for one in listings:
        languages = " to ".join(one.languages) if one.languages else "-"
        rows.append((one.name, one.task, f"{one.bytes / 1e6:.1f} MB", one.precision, languages))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, task, size, precision, languages in rows:
        cells = f"{name:{widths[0]}}  {task:{widths[1]}}  {size:>{widths[2]}}  {precision:{widths[3]}}  {languages}"
        print(cells.rstrip())
