"""Translation of whole documents by `sightline translate --to`."""

import asyncio
import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sightline.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, UsageError, fail
from sightline.commands.bundles import service_of_all
from sightline.service.api_errors import ApiError
from sightline.service.inference.call import Call
from sightline.service.inference.routing import detect, find_steps, load_steps, models_of, source_languages
from sightline.service.inference.service import Service
from sightline.service.inference.translation import TranslationStep, UsageRecord, translate_marked
from sightline.service.settings import Settings
from sightline.translation.files.document import MAX_BYTES, DocumentError
from sightline.translation.files.kinds import KINDS, read_document
from sightline.translation.marks import MarkedText, PlacedMark, TranslatedText

# Flags of the fields that a model can reject.
FLAGS = {"source_language": "--from", "target_language": "--to", "num_beams": "--beams", "glossary": "--glossary"}
CHARACTERS = 8_000  # of texts that are translated at once
TEXTS = 256


def read_glossary(path: Path) -> dict[str, str]:
    """Read terms and their translations from a table. Raises `OSError` or `UsageError`."""
    if path.suffix.lower() not in (".tsv", ".csv"):
        raise UsageError(f"--glossary {path} must be a .tsv or a .csv file")
    terms: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, "excel" if path.suffix.lower() == ".csv" else "excel-tab")
            for row in filter(any, lines):
                if len(row) != 2 or not all(cell.strip() for cell in row):
                    raise UsageError(f"{path}, line {lines.line_num} must have a term and its translation")
                terms[row[0]] = row[1]
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8; convert it to UTF-8") from None
    return terms


def translate_documents(
    files: Sequence[str],
    source: str | None,
    to: str,
    out: Path | None,
    bundle: Path | None,
    beams: int,
    glossary: Mapping[str, str],
    settings: Settings,
) -> int:
    """Translate documents into languages, and return the exit code.

    Without a `source` language, that of each document is detected if the models read several.
    Raises `UsageError`, and the errors of `service_of_all`.
    """
    languages = [tag.strip() for tag in to.split(",")]
    if not all(tag.replace("-", "").replace("_", "").isalnum() for tag in languages):
        raise UsageError("--to must be languages with commas between them, such as de or de,pt-BR")
    for file in files:
        if file == "-" or Path(file).suffix.lower().lstrip(".") not in KINDS:
            known = ", ".join(f".{kind}" for kind in KINDS)
            raise UsageError(f"{file} is no document of a known format, which are {known}; lines need no --to")
        if not Path(file).is_file():
            raise UsageError(f"{file} does not exist, or is no file")
    if out is not None:
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out must be a folder for documents, but {out} is a file")
        out.mkdir(exist_ok=True)
    wanted: dict[Path, tuple[Path, str]] = {}  # by target
    for language in dict.fromkeys(languages):
        targets: dict[Path, Path] = {}
        for path in map(Path, files):
            target = (out or path.parent) / f"{path.stem}.{language}{path.suffix}"
            if targets.get(target, path) != path:
                raise UsageError(f"{path} and {targets[target]} would both become {target}; translate them apart")
            targets[target] = path
        for target in [each for each in targets if each.exists()]:
            print(f"{target} exists; remove it to translate {targets.pop(target)} again", file=sys.stderr)
        wanted.update({target: (path, language) for target, path in targets.items()})
    if not wanted:
        return 0
    service = service_of_all(bundle, settings)
    if not any(model.manifest.languages for model in service.models.values()):
        raise UsageError(
            f"{bundle or settings.bundles} has no model that translates; see `sightline models get --help`"
        )

    async def drive() -> int:
        code = 0
        service.worker.start()
        try:
            for target, (path, language) in wanted.items():
                requested = {"source_language": source, "target_language": language, "num_beams": beams}
                try:
                    await _translate_document(service, path, target, requested, glossary)
                except DocumentError as error:
                    code = fail(f"{path} {error}", EXIT_FAILED)
                except ApiError as error:
                    code = fail(f"{path}: {error.message(FLAGS)}", EXIT_FAILED)
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
    """Translate a document between the languages that are requested; texts that an earlier run
    translated are in a second file until it is complete.
    """
    if source.stat().st_size > MAX_BYTES:
        raise DocumentError(f"has more than {MAX_BYTES // 2**20} MiB; divide it")
    data = source.read_bytes()
    document = read_document(source.name, data)
    steps = await _steps(service, document.texts, requested)
    digests = [step.model.manifest.digest for step in steps]
    sha256 = hashlib.sha256(data).hexdigest()
    identity = json.dumps([sha256, digests, requested, dict(glossary)])
    progress = target.with_name(f"{target.name}.progress")
    done = _read_progress(progress, identity)
    if not done:
        progress.write_text(f"{identity}\n", encoding="utf-8")
    total = sum(len(text.text) for text in document.texts)
    with (
        progress.open("a", encoding="utf-8") as record,
        tqdm(total=total, desc=target.name, unit="character", unit_scale=True, disable=None) as bar,
    ):
        bar.update(sum(len(text.text) for text in document.texts[: len(done)]))
        for group in _groups(document.texts[len(done) :]):
            call = Call(service, "translate")
            try:
                record_of_call = UsageRecord(call)
                translated = await translate_marked(call, steps, group, record_of_call, glossary)
            finally:
                call.close()
            results = [best for best, *_ in translated]
            lines = [json.dumps([each.text, [astuple(mark) for mark in each.marks]]) for each in results]
            record.write("".join(f"{line}\n" for line in lines))
            record.flush()
            done += results
            bar.update(sum(len(text.text) for text in group))
    partial = target.with_name(f"{target.name}.new")
    partial.write_bytes(document.write(done, requested["target_language"]))
    partial.replace(target)
    progress.unlink()


async def _steps(service: Service, texts: Sequence[MarkedText], requested: dict[str, Any]) -> list[TranslationStep]:
    """Return the models that translate a document one after the other."""
    call = Call(service, "translate")
    try:
        source, target = requested["source_language"], requested["target_language"]
        if source is None:
            [source, *others] = source_languages(call, target)
            if others:
                beginning = "\n".join(text.text for text in texts)[:CHARACTERS]
                [[found, *_]] = await detect([beginning], [source, *others])
                source = found.language
        route = find_steps(call, models_of(call, None), None, source, target)
        return await load_steps(call, route, requested)
    finally:
        call.close()


def _groups(texts: Sequence[MarkedText]) -> Iterator[list[MarkedText]]:
    group: list[MarkedText] = []
    for text in texts:
        if group and (len(group) >= TEXTS or sum(len(each.text) for each in group) + len(text.text) > CHARACTERS):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def _read_progress(path: Path, identity: str) -> list[TranslatedText]:
    """Return the translations that a file has, if they are of the same document and model; the file
    loses what is incomplete.
    """
    if not path.exists():
        return []
    first, *lines = path.read_text(encoding="utf-8").split("\n")
    if first != identity:
        return []
    complete = lines[:-1]  # a line that was not written as a whole has no end
    path.write_text("".join(f"{line}\n" for line in [first, *complete]), encoding="utf-8")
    return [TranslatedText(text, [PlacedMark(*mark) for mark in marks]) for text, marks in map(json.loads, complete)]
