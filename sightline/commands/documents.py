"""Translation of whole documents by `sightline translate --to`."""

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from tqdm import tqdm

from sightline.base.bundle import Manifest
from sightline.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, UsageError, fail
from sightline.base.text.languages import find_language
from sightline.commands.bundles import choose_bundle, load_service
from sightline.service.api_errors import ApiError
from sightline.service.inference.call import Call
from sightline.service.inference.service import ServedModel, Service
from sightline.service.inference.translation import TranslationStep, UsageRecord, translate_marked
from sightline.service.parameters import GenerateParameters
from sightline.service.settings import Settings
from sightline.translation.files.document import MAX_BYTES, DocumentError
from sightline.translation.files.kinds import KINDS, read_document
from sightline.translation.glossary import read_terms
from sightline.translation.marks import MarkedText, PlacedMark, TranslatedText

CHARACTERS = 8_000  # of texts that are translated at once
TEXTS = 256


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


def translate_documents(
    files: Sequence[str],
    to: str,
    out: Path | None,
    bundle: Path | None,
    beams: int,
    glossary: Mapping[str, str],
    settings: Settings,
) -> int:
    """Translate documents into languages, and return the exit code.

    Raises `UsageError`, and the errors of `choose_bundle` and `load_service`.
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
    code = 0
    for language in dict.fromkeys(languages):
        targets: dict[Path, Path] = {}
        for source in map(Path, files):
            target = (out or source.parent) / f"{source.stem}.{language}{source.suffix}"
            if targets.get(target, source) != source:
                raise UsageError(f"{source} and {targets[target]} would both become {target}; translate them apart")
            targets[target] = source
        for target in [each for each in targets if each.exists()]:
            print(f"{target} exists; remove it to translate {targets.pop(target)} again", file=sys.stderr)
        if targets:
            code = _translate_into(language, targets, bundle, beams, glossary, settings) or code
            if code == EXIT_INTERRUPTED:
                return fail("interrupted; the same command continues", code)
    return code


def _translate_into(
    language: str,
    targets: dict[Path, Path],
    bundle: Path | None,
    beams: int,
    glossary: Mapping[str, str],
    settings: Settings,
) -> int:
    def is_able(manifest: Manifest) -> bool:
        pairs = manifest.languages
        return "generate" in manifest.tasks and pairs is not None and find_language(language, pairs.targets) is not None

    folder, manifest = choose_bundle(bundle, settings, is_able, f"cannot translate into {language}")
    service, model = load_service(folder, manifest, settings)
    parameters = GenerateParameters(num_beams=beams, target_language=language, split_sentences=True)

    async def drive() -> int:
        code = 0
        service.worker.start()
        try:
            for target, source in targets.items():
                try:
                    await _translate_document(service, model, source, target, language, parameters, glossary)
                except DocumentError as error:
                    code = fail(f"{source} {error}", EXIT_FAILED)
                except ApiError as error:
                    code = fail(f"{source}: {error.message({})}", EXIT_FAILED)
        finally:
            await service.worker.stop(0.0)
        return code

    try:
        return asyncio.run(drive())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


async def _translate_document(
    service: Service,
    model: ServedModel,
    source: Path,
    target: Path,
    language: str,
    parameters: GenerateParameters,
    glossary: Mapping[str, str],
) -> None:
    """Translate a document; texts that an earlier run translated are in a second file until it is
    complete.
    """
    if source.stat().st_size > MAX_BYTES:
        raise DocumentError(f"has more than {MAX_BYTES // 2**20} MiB; divide it")
    data = source.read_bytes()
    document = read_document(source.name, data)
    sha256 = hashlib.sha256(data).hexdigest()
    identity = json.dumps([sha256, model.manifest.digest, parameters.num_beams, language, dict(glossary)])
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
        steps = [TranslationStep(model, parameters)]
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
    partial.write_bytes(document.write(done, language))
    partial.replace(target)
    progress.unlink()


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
