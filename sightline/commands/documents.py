"""Translation of whole documents by `sightline translate --to`."""

import asyncio
import hashlib
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from sightline.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, CommandError, UsageError, fail
from sightline.commands.output import Progress
from sightline.service.api_errors import ApiError
from sightline.service.inference.call import Call, UsageRecord
from sightline.service.inference.documents import sample_of
from sightline.service.inference.routing import AUTO, load_steps, routes_of
from sightline.service.inference.service import Service
from sightline.service.inference.translation import num_repaired, translate_marked
from sightline.service.settings import Settings
from sightline.translation.files.document import MAX_BYTES, DocumentError, groups_of
from sightline.translation.files.kinds import KINDS, read_document
from sightline.translation.glossary import read_terms
from sightline.translation.marks import PlacedMark, TranslatedText

if TYPE_CHECKING:
    from sightline.commands.translate import TranslateOptions

# Flags of the fields that a model can reject.
FLAGS = {
    "source_language": "--from",
    "target_language": "--to",
    "num_beams": "--beams",
    "split_sentences": "--split-sentences",
    "repair": "--repair",
    "return_coverage": "--report",
    "glossary": "--glossary",
}


def read_glossary(path: Path) -> dict[str, str]:
    """Read terms and their translations from a table. Raises `OSError` or `UsageError`."""
    if path.suffix.lower() not in (".tsv", ".csv"):
        raise UsageError(f"--glossary {path} must be a .tsv or a .csv file")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return read_terms(file, "," if path.suffix.lower() == ".csv" else "\t")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8; convert it to UTF-8") from None
    except ValueError as error:
        raise UsageError(f"{path}, {error}") from None


def translate_documents(options: "TranslateOptions", to: str, settings: Settings) -> int:
    """Translate documents into languages, and return the exit code.

    Without a source language, that of each document is detected if the models read several. Raises
    `UsageError`, and the errors of `open_service`.
    """
    files, out, bundle = options.file, options.out, options.bundle
    glossary = {} if options.glossary is None else read_glossary(options.glossary)
    languages = [tag.strip() for tag in to.split(",")]
    if not all(tag.replace("-", "").replace("_", "").isalnum() for tag in languages):
        raise UsageError("--to must be languages with commas between them, such as de or de,pt-BR")
    for file in files:
        if file == "-" or Path(file).suffix.lower().lstrip(".") not in KINDS:
            known = ", ".join(f".{kind}" for kind in KINDS)
            raise UsageError(f"{file} is no document of a known format, which are {known}; lines need no --to")
        if not Path(file).is_file():
            raise UsageError(f"{file} does not exist, or is no file")
    target_file = None
    if out is not None and not out.is_dir():
        if len(files) == len(languages) == 1 and out.suffix == Path(files[0]).suffix:
            target_file = out
        elif out.exists() or out.suffix.lower().lstrip(".") in KINDS:
            raise UsageError(f"--out {out} must be a folder, or for one document and one language a file of its format")
        else:
            out.mkdir()
    wanted: dict[Path, tuple[Path, str]] = {}  # by target
    for language in dict.fromkeys(languages):
        targets: dict[Path, Path] = {}
        for path in map(Path, files):
            target = target_file or (out or path.parent) / f"{path.stem}.{language}{path.suffix}"
            if targets.get(target, path) != path:
                raise UsageError(f"{path} and {targets[target]} would both become {target}; translate them apart")
            targets[target] = path
        for target in [each for each in targets if each.exists()]:
            print(f"{target} exists; remove it to translate {targets.pop(target)} again", file=sys.stderr)
        wanted.update({target: (path, language) for target, path in targets.items()})
    if not wanted:
        return 0
    from sightline.service.loading import open_service  # imports ONNX Runtime

    service = open_service(settings, bundle)
    if not any(model.manifest.languages for model in service.models.values()):
        raise UsageError(
            f"{bundle or settings.bundles} has no model that translates; see `sightline models get --help`"
        )

    async def drive() -> int:
        code = 0
        service.worker.start()
        try:
            for target, (path, language) in wanted.items():
                requested: dict[str, Any] = {"source_language": options.from_, "target_language": language}
                requested |= {"num_beams": options.beams, "repair": options.repair}
                try:
                    await _translate_document(service, path, target, requested, glossary)
                except DocumentError as error:
                    code = fail(f"{path} {error}", EXIT_FAILED)
                except ApiError as error:
                    code = fail(f"{path}: {error.message(FLAGS)}", EXIT_FAILED)
                except (CommandError, UsageError) as error:
                    code = fail(error, EXIT_FAILED)
        finally:
            await service.worker.stop(0.0)
        return code

    try:
        return asyncio.run(drive())
    except KeyboardInterrupt:
        return fail("interrupted; the same command continues", EXIT_INTERRUPTED)


async def _translate_document(
    service: Service, source: Path, target: Path, requested: dict[str, Any], glossary: Mapping[str, str]
) -> None:
    """Translate a document between the languages that are requested, or continue an earlier run."""
    if source.stat().st_size > MAX_BYTES:
        raise DocumentError(f"has more than {MAX_BYTES // 2**20} MiB; divide it")
    data = source.read_bytes()
    document = read_document(source.name, data)
    with closing(Call(service, "translate")) as call:
        languages = {**requested, "source_language": requested["source_language"] or AUTO}
        [(_, route)] = await routes_of(call, [sample_of(document)], languages)
        steps = await load_steps(call, route, requested)  # models that translate one after the other
    inputs = requested | {
        "document": hashlib.sha256(data).hexdigest(),
        "models": [step.model.manifest.digest for step in steps],
        "glossary": dict(glossary),
    }
    total = sum(len(text.text) for text in document.texts)
    with (
        Progress(target, inputs) as progress,
        tqdm(total=total, desc=target.name, unit="character", unit_scale=True, disable=None) as bar,
    ):
        bar.update(sum(len(text.text) for text in document.texts[: progress.num_done]))
        for group in groups_of(document.texts[progress.num_done :]):
            with closing(Call(service, "translate")) as call:
                found = await translate_marked(call, steps, group, UsageRecord(call), glossary)
            progress.write([[best.text, [*map(astuple, best.marks)], num_repaired([best])] for best, *_ in found])
            bar.update(sum(len(text.text) for text in group))
        if number := sum(number for *_, number in progress.done):
            print(f"{target}: sentences that were translated again: {number}", file=sys.stderr)
        done = [TranslatedText(text, [PlacedMark(*mark) for mark in marks]) for text, marks, _ in progress.done]
        progress.finish(document.write(done, requested["target_language"]))
