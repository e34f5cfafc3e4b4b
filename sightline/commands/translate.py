"""`sightline translate`: translate documents, or the lines of a file, without HTTP."""

import asyncio
import hashlib
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import Field
from tqdm import tqdm

from sightline.base.bundle import MAX_BEAMS, Manifest
from sightline.base.errors import EXIT_INTERRUPTED, CommandError, UsageError, fail
from sightline.base.options import Options, Shown, parse_with
from sightline.base.parser import Parser
from sightline.base.text.languages import find_language
from sightline.base.text.sentences import has_letter, split_sentences
from sightline.commands.bundles import choose_bundle
from sightline.commands.documents import FLAGS, translate_documents
from sightline.commands.output import Progress, StreamOutput, to_bytes
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import Texts
from sightline.service.inference.call import Call
from sightline.service.inference.generate import GenerateOutput, SplitOutput, begin, check_parameters
from sightline.service.inference.sentence_splitting import generate_texts
from sightline.service.inference.service import ServedModel, Service
from sightline.service.parameters import GenerateParameters
from sightline.service.settings import NO_LIMITS, Settings, make_settings

# Lines in progress for each row. Rows stay full while finished lines wait for an earlier line.
LINES_PER_ROW = 4
CANNOT_TRANSLATE = "cannot translate, because it is no encoder-decoder"
TEACHER_BEAMS = 4  # of translations that are the targets of a training
MAX_SHOWN = 8  # languages in an error

Output = StreamOutput | Progress


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
    """File for lines or for one document, or folder for documents. Default: standard output, or
    the folder of each document"""
    glossary: Annotated[Path | None, Shown("FILE")] = None
    """Terms of documents and their translations: a .tsv or .csv file with a pair on each line"""
    bundle: Annotated[Path | None, Shown("FOLDER")] = None
    """Bundle to use. Default: those of --bundles that translate between the languages of documents;
    for lines, the default model, or the only bundle that translates"""
    report: Annotated[Path | None, Shown("FILE")] = None
    """Table of the lines whose translation omits words or has doubtful ones: number of the line,
    smallest coverage, these words, and the repair. For lines, and for models that show omissions"""
    beams: Annotated[int, Ge(1), Le(MAX_BEAMS)] = Field(1, description=f"Beams of each line, 1 to {MAX_BEAMS}.")
    repair: bool = False
    """Translate sentences again that omit words, with models that show omissions"""
    split_sentences: bool | None = None
    """Translate the sentences of a line one by one, and keep the spacing, line breaks and blank
    lines as they are. Default: only for models that were trained on sentences"""


def run(parser: Parser, words: Sequence[str]) -> int:
    flags = ("bundles", "provider", "threads")
    options, texts = parse_with(parser, words, TranslateOptions, Settings, flags)
    import_module("onnxruntime")  # if it is missing, this is the first error; `--help` does not need it
    settings = make_settings({**texts, **NO_LIMITS})
    if options.to is None:
        for flag, value in (("--from", options.from_), ("--glossary", options.glossary)):
            if value is not None:
                raise UsageError(f"{flag} needs --to, such as --to de")
        if len(options.file) > 1:
            raise UsageError("several files need --to, such as --to de")
        return translate_lines(options, settings)
    if options.report is not None:
        raise UsageError("--report is for the lines of a file; leave out --to")
    return translate_documents(options, options.to, settings)


def translate_lines(options: TranslateOptions, settings: Settings) -> int:
    """Translate the lines of a file, or continue an earlier run, and return the exit code."""
    folder, manifest = choose_bundle(options.bundle, settings, translates, CANNOT_TRANSLATE)
    source, out = read_source(options.file[0]), options.out
    is_split = manifest.training_unit == "sentence" if options.split_sentences is None else options.split_sentences
    parameters = GenerateParameters(
        num_beams=options.beams,
        split_sentences=is_split,
        return_coverage=options.report is not None,
        repair=options.repair,
    )
    if out is not None and out.is_file() and out.stat().st_size:
        raise UsageError(f"{out} exists; remove it or choose another --out")
    if options.report is not None and options.report in (Path(options.file[0]), out):
        raise UsageError(f"--report {options.report} is also the source or --out; choose another file")
    with ExitStack() as stack:
        output: Output = StreamOutput(sys.stdout.buffer)
        if out is not None and out.exists() and not out.is_file():  # a device or a pipe
            output = StreamOutput(stack.enter_context(out.open("wb")))
        elif out is not None:
            inputs = {
                "source": source.sha256,
                "model": manifest.digest,
                "number of beams": options.beams,
                "splitting of sentences": is_split,
                "repair": options.repair,
            }
            output = stack.enter_context(Progress(out, inputs))
        if output.num_done:
            print(f"continuing {out} after line {output.num_done}", file=sys.stderr)
        report = None if options.report is None else Report(options.report, output.num_done)
        try:
            translate_into(output, source, folder, settings, parameters, report=report)
        except KeyboardInterrupt:
            kept = f" after {output.num_done} of {len(source.lines)} lines; the same command continues"
            return fail(f"interrupted{kept if isinstance(output, Progress) else ''}", EXIT_INTERRUPTED)
        if isinstance(output, Progress):
            output.finish(to_bytes(output.done))
    return 0


class Report:
    """Table of the lines with omitted or doubtful words, and of repaired ones.

    The row of a line is written before it, so that a run that continues keeps those of all lines.
    """

    def __init__(self, path: Path, num_done: int) -> None:
        """Create the file, or keep the rows of lines that are done."""
        self._path = path
        rows = path.read_text(encoding="utf-8").split("\n") if num_done and path.exists() else []
        kept = [row for row in rows if (number := row.partition("\t")[0]).isdecimal() and int(number) <= num_done]
        path.write_text("\n".join(["line\tcoverage\tomitted\tdoubtful\trepair", *kept, ""]), encoding="utf-8")

    def write(self, row: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(row)


def row_of(number: int, output: GenerateOutput | SplitOutput) -> str:
    """Return the row of a line in a report; empty if nothing is to report."""
    coverage, sentences = output.coverage, output.sentences if isinstance(output, SplitOutput) else []
    methods = [repair.method for repair in (output.repair, *(one.repair for one in sentences)) if repair]
    if coverage is None or not (coverage.omitted or coverage.doubtful or methods):
        return ""
    words = [" ".join(word["text"] for word in words) for words in (coverage.omitted, coverage.doubtful)]
    return "\t".join([str(number), f"{coverage.coverage:.2f}", *words, " ".join(methods)]) + "\n"


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
        with Progress(out, {"source": digest, "teacher": manifest.digest, **fields}) as output:
            if output.num_done < len(texts):
                print(f"translating {len(texts) - output.num_done:,} sources with {bundle}", file=sys.stderr)
                source, parameters = Source("train", tuple(texts), digest), GenerateParameters.model_validate(fields)
                translate_into(output, source, folder, settings, parameters, skips_long=True)
            out.write_bytes(to_bytes(output.done))
    except (CommandError, UsageError) as error:
        raise UsageError(f"--teacher: {error}".replace("--out", "--run")) from None


@dataclass(frozen=True)
class Source:
    """The text to translate."""

    name: str  # for messages
    lines: tuple[str, ...]  # without line feeds
    sha256: str


def read_source(file: str) -> Source:
    """Read a file, or standard input for `-`.

    Raises `OSError`, or `CommandError` if a line is not UTF-8.
    """
    name = "standard input" if file == "-" else file
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise CommandError(f"{name}, line {number} is not UTF-8; convert the file to UTF-8") from None
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # the end of the last line begins no other
    return Source(name, tuple(lines), hashlib.sha256(data).hexdigest())


def translate_into(
    output: Output,
    source: Source,
    folder: Path,
    settings: Settings,
    parameters: GenerateParameters,
    *,
    skips_long: bool = False,
    report: Report | None = None,
) -> None:
    """Translate the lines that the output does not have yet.

    With `skips_long`, lines that are too long have blank translations. Raises `CommandError` for a
    line that cannot be translated, `UsageError` if the model rejects a parameter, and the errors of
    `open_service`.
    """
    from sightline.service.loading import open_service  # imports ONNX Runtime

    num_left = len(source.lines) - output.num_done
    service = open_service(settings, folder)

    async def drive() -> None:
        service.worker.start()
        try:
            with closing(Call(service, "translate")) as call:
                model = await call.model(service.default_model)
            translator = LineTranslator(service, model, parameters, skips_long)
            translator.check(source, output.num_done)
            with tqdm(total=len(source.lines), initial=output.num_done, unit="line", disable=None) as bar:
                lines_left = enumerate(source.lines[output.num_done :], output.num_done + 1)
                async for line, row in translator.translated(lines_left):
                    if report is not None:
                        report.write(row)
                    output.write([line])
                    bar.update()
        finally:
            await service.worker.stop(0.0)

    started = time.monotonic()
    try:
        asyncio.run(drive())
    except ApiError as error:
        raise CommandError(f"line {output.num_done + 1} of {source.name}: {error.message({})}") from None
    if sys.stderr.isatty():
        print(f"{num_left} lines in {time.monotonic() - started:.1f} s with {service.default_model}", file=sys.stderr)


@dataclass(frozen=True)
class LineTranslator:
    """Translates lines by one model."""

    service: Service
    model: ServedModel
    parameters: GenerateParameters
    skips_long: bool

    def check(self, source: Source, first: int) -> None:
        """Check that the model accepts the parameters, and that it can read every line from index
        `first` on, or every sentence of them.

        Raises `UsageError`, or `CommandError` for the first line or sentence with too many tokens.
        """
        try:
            check_parameters(self.model, self.parameters, 1)
            begin(Call(self.service, "translate"), self.model, self.parameters)
        except ApiError as error:
            raise UsageError(complete_message(error.message(FLAGS), error.param(FLAGS))) from None
        limit, languages = self.model.manifest.limits.max_source_tokens, self.model.manifest.languages
        for number, line in enumerate(() if self.skips_long else source.lines[first:], first + 1):
            texts: Sequence[str] = [line.removesuffix("\r")]
            if self.parameters.split_sentences:
                split = split_sentences(line, languages.source if languages else "", max_sentences=len(line))
                texts = [] if split is None else split.sentences
            for index, text in enumerate(texts, 1):
                count = len(self.model.source_tokenizer.encode(text)) if has_letter(text) else 0
                if count > limit:
                    sentence = f", sentence {index}" if len(texts) > 1 else ""
                    raise CommandError(
                        f"{source.name}, line {number}{sentence} has {count} tokens, but {self.model.name} reads at "
                        f"most {limit}; split it into shorter lines"
                    )

    async def translated(self, lines: Iterator[tuple[int, str]]) -> AsyncIterator[tuple[str, str]]:
        """Yield the translations and their rows of a report, in order.

        Many lines are in progress at once, so that the engine decodes them in one batch. Raises
        `ApiError` if a line failed.
        """
        running: deque[asyncio.Task[tuple[str, str]]] = deque()
        try:
            while True:
                while len(running) < LINES_PER_ROW * self.model.max_rows and (line := next(lines, None)) is not None:
                    running.append(asyncio.create_task(self.translate_line(*line)))
                if not running:
                    return
                yield await running[0]
                running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def translate_line(self, number: int, line: str) -> tuple[str, str]:
        """Translate a line, and make its row of a report.

        With `split_sentences`, all whitespace around and between its sentences is kept; otherwise a
        blank line yields an empty one. Raises `ApiError`.
        """
        is_split = self.parameters.split_sentences
        if not line.strip():
            return line if is_split else "", ""
        text = Texts.one(line if is_split else line.removesuffix("\r"))
        with closing(Call(self.service, "translate")) as call:
            try:
                result = await generate_texts(call, self.model, text, self.parameters)
            except ApiError as error:
                if self.skips_long and error.code == "input_too_long":
                    return "", ""
                raise
        output = result.outputs[0]
        # A line must stay one line. Models of single lines do not generate line breaks.
        translation = output.text.replace("\n", " ")
        return translation if is_split else translation.replace("\r", " "), row_of(number, output)
