"""`sightline translate`: translate documents, or the lines of a file, without HTTP."""

import asyncio
import hashlib
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import Field
from tqdm import tqdm

from sightline.base.bundle import MAX_BEAMS, BundleError, Manifest
from sightline.base.errors import EXIT_INTERRUPTED, UsageError, exit_status, fail
from sightline.base.options import Options, Shown, add_options, parse_with
from sightline.base.parser import Parser
from sightline.base.text.languages import find_language
from sightline.base.text.sentences import has_letter, split_sentences
from sightline.commands.bundles import choose_bundle, load_service
from sightline.commands.documents import read_glossary, translate_documents
from sightline.commands.output import OutputBusyError, OutputError, OutputFile, StreamOutput, TranslationOutput
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.inference.call import Call
from sightline.service.inference.coverage import TextCoverage
from sightline.service.inference.generate import check_parameters
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.inference.service import ServedModel, Service
from sightline.service.parameters import GenerateParameters
from sightline.service.settings import NO_LIMITS, Settings, make_settings

# Lines in progress for each row. Rows stay full while finished lines wait for an earlier line.
LINES_PER_ROW = 4
CANNOT_TRANSLATE = "cannot translate, because it is no encoder-decoder"
TEACHER_BEAMS = 4  # of translations that are the targets of a training
MAX_SHOWN = 8  # languages in an error
# Flags of the parameters that a model can reject.
FLAGS = {"num_beams": "--beams", "split_sentences": "--split-sentences"}


class LineError(Exception):
    """A line that cannot be translated; the message names it and the way out."""


class TranslateOptions(Options):
    """Translate documents, or the lines of a file.

    With --to, report.docx becomes report.de.docx. Without it, a file has one text on each line. If
    the command is killed, run it again: finished documents are skipped, and a file of lines is
    continued.
    """

    example = "report.docx film.srt --to de --out translated"

    file: Annotated[tuple[str, ...], Shown(is_positional=True)]
    """Documents (.txt, .md, .html, .srt, .vtt, .po, .json, .yaml, .xliff, .docx, .odt, .pptx,
    .epub), or one file with a text on each line, in UTF-8; - is standard input."""
    to: Annotated[str | None, Shown("LANGUAGE")] = None
    """Languages of documents, as BCP 47 tags with commas between them."""
    from_: Annotated[str | None, Shown("LANGUAGE")] = None
    """Language of documents. Default: detected, if the bundles read several"""
    out: Annotated[Path | None, Shown("PATH")] = None
    """File for lines, or folder for documents. Default: standard output, or the folder of each
    document"""
    glossary: Annotated[Path | None, Shown("FILE")] = None
    """Terms of documents and their translations: a .tsv or .csv file with a pair on each line"""
    bundle: Annotated[Path | None, Shown("FOLDER")] = None
    """Bundle to use. Default: those of --bundles that translate between the languages of documents;
    for lines, the default model, or the only bundle that translates"""
    report: Annotated[Path | None, Shown("FILE")] = None
    """Table of the lines whose translation omits words or has doubtful ones: number of the line,
    smallest coverage, and these words. For lines, and for models that show omissions"""
    beams: Annotated[int, Ge(1), Le(MAX_BEAMS)] = Field(1, description=f"Beams of each line, 1 to {MAX_BEAMS}.")
    split_sentences: bool | None = None
    """Translate the sentences of a line one by one, and keep the spacing, line breaks and blank
    lines as they are. Default: only for models that were trained on sentences"""


@dataclass(frozen=True)
class Source:
    """The text to translate."""

    name: str  # for messages
    lines: tuple[str, ...]  # without line feeds
    sha256: str


def run(parser: Parser, words: Sequence[str]) -> int:
    flags = ("bundles", "provider", "threads")
    add_options(parser, Settings, flags)
    options, texts = parse_with(parser, words, TranslateOptions, flags)
    file, out = options.file[0], options.out
    import_module("onnxruntime")  # if it is missing, this is the first error; `--help` does not need it
    try:
        settings = make_settings({**texts, **NO_LIMITS})
        if options.to is not None:
            if options.report is not None:
                raise UsageError("--report is for the lines of a file; leave out --to")
            terms = {} if options.glossary is None else read_glossary(options.glossary)
            return translate_documents(
                options.file, options.from_, options.to, out, options.bundle, options.beams, terms, settings
            )
        for flag, value in (("--from", options.from_), ("--glossary", options.glossary)):
            if value is not None:
                raise UsageError(f"{flag} needs --to, such as --to de")
        if len(options.file) > 1:
            raise UsageError("several files need --to, such as --to de")
        folder, manifest = choose_bundle(options.bundle, settings, translates, CANNOT_TRANSLATE)
        source = read_source(file)
        if out is not None and file != "-" and out.exists() and out.samefile(file):
            raise OutputError(f"{out} is the file to translate; choose another --out")
        is_split = options.split_sentences
        if is_split is None:
            is_split = manifest.training_unit == "sentence"
        report = None if options.report is None else Report(options.report)
        parameters = GenerateParameters(
            num_beams=options.beams, split_sentences=is_split, return_coverage=report is not None
        )
        translate = partial(translate_into, report=report)
        inputs = {
            "source": source.sha256,
            "model": manifest.digest,
            "number of beams": options.beams,
            "splitting of sentences": is_split,
        }
        if out is not None and out.exists() and not out.is_file():
            with out.open("wb") as stream:
                return translate(StreamOutput(stream), source, folder, manifest, settings, parameters)
        if out is None:
            return translate(StreamOutput(sys.stdout.buffer), source, folder, manifest, settings, parameters)
        with OutputFile(out, inputs) as output:
            if output.num_done > len(source.lines):
                raise OutputError(
                    f"{out} has {output.num_done} lines, more than the {len(source.lines)} of {source.name}; "
                    "remove it to start again"
                )
            if output.num_done:
                print(f"continuing {out} after line {output.num_done}", file=sys.stderr)
            code = translate(output, source, folder, manifest, settings, parameters)
            if code == 0:
                output.finish()
            elif code == EXIT_INTERRUPTED:
                fail(
                    f"interrupted; {out} has {output.num_done} of {len(source.lines)} lines, and the "
                    "same command continues after them"
                )
            return code
    except (BundleError, LineError, OutputBusyError, UsageError) as error:
        return fail(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        return fail(f"{error.filename or out or 'standard output'}: {error.strerror}", exit_status(error))


class Report:
    """Table of the lines with omitted or doubtful words."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[int, TextCoverage] = {}

    def add(self, number: int, coverage: TextCoverage | None) -> None:
        if coverage is not None and (coverage.omitted or coverage.doubtful):
            self._found[number] = coverage

    def write(self) -> None:
        rows = ["line\tcoverage\tomitted\tdoubtful"]
        for number, coverage in sorted(self._found.items()):
            words = [" ".join(word["text"] for word in words) for words in (coverage.omitted, coverage.doubtful)]
            rows.append("\t".join([str(number), f"{coverage.coverage:.2f}", *words]))
        self._path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def translates(bundle: Manifest) -> bool:
    return "generate" in bundle.tasks and not bundle.is_decoder_only


def teach(bundle: Path, languages: tuple[str, str] | None, threads: int, texts: Sequence[str], out: Path) -> None:
    """Translate texts into a file, or continue it. The lines of texts that are too long are blank.

    Raises `OSError`, or `UsageError` for a bundle that does not translate between the languages.
    """
    import_module("onnxruntime")
    settings = make_settings({**NO_LIMITS, "threads": threads})
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    try:
        folder, manifest = choose_bundle(bundle, settings, translates, CANNOT_TRANSLATE)
        fields: dict[str, Any] = {"num_beams": TEACHER_BEAMS, "split_sentences": manifest.training_unit == "sentence"}
        if manifest.languages and languages:
            known = manifest.languages.sources, manifest.languages.targets
            found = [find_language(tag, tags) for tag, tags in zip(languages, known, strict=True)]
            if None in found:
                shown = " to ".join(", ".join(tags[:MAX_SHOWN]) for tags in known)
                raise UsageError(f"{bundle} translates {shown}, but the data are {' to '.join(languages)}; use another")
            fields |= dict(zip(("source_language", "target_language"), found, strict=True))
        with OutputFile(out, {"source": digest, "teacher": manifest.digest, **fields}) as output:
            if output.num_done < len(texts):
                print(f"translating {len(texts) - output.num_done:,} sources with {bundle}", file=sys.stderr)
                source, parameters = Source("train", tuple(texts), digest), GenerateParameters.model_validate(fields)
                if translate_into(output, source, folder, manifest, settings, parameters, skips_long=True):
                    raise KeyboardInterrupt
    except (BundleError, LineError, OutputBusyError, UsageError) as error:
        raise UsageError(f"--teacher: {error}".replace("--out", "--run")) from None


def read_source(file: str) -> Source:
    """Read a file, or standard input for `-`.

    Raises `OSError`, or `LineError` if a line is not UTF-8.
    """
    name = "standard input" if file == "-" else file
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise LineError(f"{name}, line {number} is not UTF-8; convert the file to UTF-8") from None
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # the end of the last line begins no other
    return Source(name, tuple(lines), hashlib.sha256(data).hexdigest())


def translate_into(
    output: TranslationOutput,
    source: Source,
    folder: Path,
    manifest: Manifest,
    settings: Settings,
    parameters: GenerateParameters,
    *,
    skips_long: bool = False,
    report: Report | None = None,
) -> int:
    """Translate the lines that the output does not have yet, and return the exit code.

    With `skips_long`, lines that are too long have blank translations. Raises `LineError` for a
    line that cannot be translated, `UsageError` if the model rejects a parameter, and the errors of
    `load_service`.
    """
    num_left = len(source.lines) - output.num_done
    service, model = load_service(folder, manifest, settings)
    try:
        check_parameters(model, parameters, 1)
    except ApiError as error:
        raise UsageError(f"{FLAGS[error.field or 'num_beams']}: {error.message({})}") from None
    if not skips_long:
        check_lengths(source, model, output.num_done, parameters)

    async def drive() -> None:
        service.worker.start()
        try:
            with tqdm(total=len(source.lines), initial=output.num_done, unit="line", disable=None) as bar:
                lines_left = enumerate(source.lines[output.num_done :], output.num_done + 1)
                async for lines in translated(service, model, lines_left, parameters, skips_long, report):
                    output.write(lines)
                    bar.update(len(lines))
        finally:
            await service.worker.stop(0.0)

    started = time.monotonic()
    try:
        asyncio.run(drive())
        if report is not None:
            report.write()
    except ApiError as error:
        raise LineError(f"line {output.num_done + 1} of {source.name}: {error.message({})}") from None
    except KeyboardInterrupt:
        if isinstance(output, StreamOutput):
            fail("interrupted")
        return EXIT_INTERRUPTED
    if sys.stderr.isatty():
        print(f"{num_left} lines in {time.monotonic() - started:.1f} s with {manifest.name}", file=sys.stderr)
    return 0


def check_lengths(source: Source, model: ServedModel, first: int, parameters: GenerateParameters) -> None:
    """Check that the model can read every line from index `first` on, or every sentence of them.

    Raises `LineError` for the first line or sentence that has too many tokens.
    """
    limit, languages = model.manifest.limits.max_source_tokens, model.manifest.languages
    for number, line in enumerate(source.lines[first:], first + 1):
        texts: Sequence[str] = [line.removesuffix("\r")]
        if parameters.split_sentences:
            split = split_sentences(line, languages.source if languages else "", max_sentences=len(line))
            texts = [] if split is None else split.sentences
        for index, text in enumerate(texts, 1):
            count = len(model.source_tokenizer.encode(text)) if has_letter(text) else 0
            if count > limit:
                sentence = f", sentence {index}" if len(texts) > 1 else ""
                raise LineError(
                    f"{source.name}, line {number}{sentence} has {count} tokens, but {model.name} reads at most "
                    f"{limit}; split it into shorter lines"
                )


async def translated(
    service: Service,
    model: ServedModel,
    lines: Iterator[tuple[int, str]],
    parameters: GenerateParameters,
    skips_long: bool,
    report: Report | None,
) -> AsyncIterator[list[str]]:
    """Yield the translations in order, in groups of those that are ready.

    Many lines are in progress at once, so that the engine decodes them in one batch. Raises
    `ApiError` if a line failed.
    """
    running: deque[asyncio.Task[str]] = deque()
    try:
        while True:
            while len(running) < LINES_PER_ROW * model.max_rows and (line := next(lines, None)) is not None:
                work = translate_line(service, model, *line, parameters, skips_long, report)
                running.append(asyncio.create_task(work))
            if not running:
                return
            await asyncio.wait([running[0]])
            ready = []
            while running and running[0].done():
                try:
                    ready.append(running[0].result())
                except ApiError:
                    if ready:
                        break  # the lines before it come first
                    raise
                running.popleft()
            yield ready
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def translate_line(
    service: Service,
    model: ServedModel,
    number: int,
    line: str,
    parameters: GenerateParameters,
    skips_long: bool,
    report: Report | None,
) -> str:
    """Translate a line. With `split_sentences`, all whitespace around and between its sentences is
    kept; otherwise a blank line yields an empty one. Raises `ApiError`.
    """
    is_split = parameters.split_sentences
    if not line.strip():
        return line if is_split else ""
    call = Call(service, "translate")
    try:
        result = await generate_texts(call, model, Texts.one(line if is_split else line.removesuffix("\r")), parameters)
    except ApiError as error:
        if skips_long and error.code == "input_too_long":
            return ""
        raise
    finally:
        call.close()
    if report is not None:
        report.add(number, result.outputs[0].coverage)
    # A line must stay one line. Models of single lines do not generate line breaks.
    text = result.outputs[0].text.replace("\n", " ")
    return text if is_split else text.replace("\r", " ")
