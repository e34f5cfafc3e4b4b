"""Actions of the commands.

PyTorch is imported only by what needs it: exports of recurrent models, and measuring BLEU.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sightline.base.bundle import (
    Alignment,
    BundleError,
    Coverage,
    Manifest,
    Quantization,
    QuantScheme,
    Shortlist,
    Verification,
)
from sightline.base.bundle_files import read_bundle, read_manifest
from sightline.base.errors import UsageError
from sightline.export.card import CARD, write_card
from sightline.export.check.alignment import GUIDED, choose_alignment, record_heads, sentences_of
from sightline.export.check.coverage import choose_coverage
from sightline.export.check.sessions import open_sessions
from sightline.export.convert.conversions import Text, half_bundle, pack_bundle, quantize_bundle
from sightline.export.convert.quality import ParallelText
from sightline.export.convert.shortlist import learn_candidates, shortlist_bundle
from sightline.export.convert.text_quality import PlainText, text_ids
from sightline.export.import_errors import VerificationError, one_line
from sightline.export.limits import GGUF_GROWTH, begin_step
from sightline.export.options import (
    DEFAULT_SENTENCES,
    FLOAT32_BITS,
    HALF_BITS,
    MAX_LOSS,
    MIN_PAIRS,
    AlignOptions,
    CheckpointOptions,
    CoverageOptions,
    ExportOptions,
    ImportOptions,
    Kind,
    PackOptions,
    QuantizationRecipe,
    QuantizeOptions,
    RewriteOptions,
    ShortlistOptions,
    VerifyOptions,
    languages_of,
    metadata_of,
)
from sightline.export.pipeline import Export, export_checkpoint, verify_bundle
from sightline.export.sources.firefox import find_firefox_files
from sightline.export.sources.firefox.marian_binary import read_file
from sightline.export.sources.firefox.shortlist import Candidates, parse_shortlist
from sightline.export.sources.opened_checkpoint import Provenance, detect_kind
from sightline.export.sources.run_folder import RunRecord, is_run, read_record, run_checkpoint
from sightline.export.writing import clean_up, clear_disk_errors, replacing, temporary_sibling
from sightline.model.data.text import numbered_sentences
from sightline.model.data.tokenizer_training import encode_lines, read_tokenizer
from sightline.model.parts import load_parts

HELD_OUT = 10  # one of this number of texts measures the loss of a shortlist


def export(options: CheckpointOptions) -> Verification | Quantization:
    """Export a training run, or a folder that others wrote; see `_write` for the result."""
    out = options.out
    _check_apart(options.checkpoint, out)
    with run_checkpoint(options.checkpoint) as (checkpoint, note):
        _print_note(note)
        _check_apart(checkpoint, out)
        kind: Kind = options.kind or detect_kind(checkpoint)
        if kind == "gguf":
            with converted(checkpoint) as (folder, provenance):
                return export_folder(options, out, folder, provenance=provenance)
        record = read_record(checkpoint)
        result = export_folder(options, out, checkpoint, kind, record)
    if record is not None and not write_card(out, record):
        _print_note(f"{out / CARD} was not written by this command, so it is kept")
    return result


def _recorded(record: RunRecord | None, is_named: bool) -> dict[str, Any]:
    """Return the fields of the metadata that the record of a training determines.

    Languages that are not language tags are an error, unless an option names them (`is_named`).
    """
    if record is None:
        return {}
    known: dict[str, Any] = {"chat": None}  # `sightline.export.describe` has the format of the training
    if record.license:
        known["license"] = record.license
    if record.task not in (None, "translation"):
        known["languages"] = None  # the bundle that is replaced may be another model
    elif record.task and record.source and record.target and not is_named:
        try:
            known["languages"] = languages_of((record.source, record.target))
        except UsageError as error:
            raise UsageError(f"{error}; name the languages with --languages SOURCE TARGET") from None
    return known


def _print_note(note: str) -> None:
    if note:
        print(f"note: {note}", file=sys.stderr)


def _check_apart(checkpoint: Path, out: Path) -> None:
    """Raise `UsageError` if the bundle or its checkpoint contains the other."""
    source, resolved = checkpoint.resolve(), out.resolve()
    is_inside = source.is_dir() and not is_run(source) and resolved.is_relative_to(source)
    if source.is_relative_to(resolved) or is_inside:
        raise UsageError(f"--out {out} would replace the checkpoint {source}; name another folder")


@contextmanager
def converted(file: Path) -> Iterator[tuple[Path, Provenance]]:
    """Convert a GGUF file to a temporary folder of Hugging Face."""
    from sightline.export.sources.gguf import convert

    with TemporaryDirectory(prefix="sightline-") as temporary:
        folder = Path(temporary)
        begin_step(f"converting {file}", GGUF_GROWTH * file.stat().st_size)
        yield folder, convert(file, folder)


def export_folder(
    options: ImportOptions,
    out: Path,
    checkpoint: Path,
    kind: Kind = "huggingface",
    record: RunRecord | None = None,
    provenance: Provenance = Provenance(),  # noqa: B008 - immutable
) -> Verification | Quantization:
    """Export a folder; see `_write` for the result.

    Args:
        record: record of the training, if the folder belongs to a training run.
        provenance: location from which it was downloaded.
    """
    clean_up(out)  # before the metadata of the existing bundle is read
    metadata = metadata_of(options, out, _recorded(record, options.languages is not None))
    is_half = isinstance(options, CheckpointOptions) and options.half_weights
    flags = [
        flag for flag, is_given in (("half-weights", is_half), ("contributions", options.contributions)) if is_given
    ]
    bits = options.bits or (8 if _has_8_bits(kind, provenance) and not flags else FLOAT32_BITS)
    if flags and bits != FLOAT32_BITS:
        raise UsageError(f"--bits {bits} cannot be combined with --{flags[0]}; leave out one of them")
    if kind == "training":  # it is checked with the sentences that it can read
        assert isinstance(options, CheckpointOptions)  # a download is no training run
        path = options.sentences or DEFAULT_SENTENCES
        numbered = numbered_sentences(path)
        config, tokenizer = load_parts(checkpoint)
        encoded = encode_lines(tokenizer, list(numbered.values()))
        sentences = tuple(_drop_too_long(config.max_positions, numbered, encoded, path, "--sentences"))
        changes = ExportOptions(half_weights=is_half, sentences=sentences, tolerance=options.tolerance)
    else:
        languages = metadata.languages if options.languages else None
        metadata = dataclasses.replace(metadata, chat=None, languages=languages)
        changes = ExportOptions(options.max_tokens, options.task, ignored_keys=options.ignore_key)
    changes = dataclasses.replace(changes, contributions=options.contributions)
    export = Export(checkpoint, out, metadata, changes, kind, provenance)
    is_shortened = kind == "firefox" and not (isinstance(options, CheckpointOptions) and options.no_shortlist)
    is_shortened = is_shortened and bits != HALF_BITS and find_firefox_files(checkpoint).shortlist is not None
    return _write(export, bits, options.bits is None, is_shortened)


def _has_8_bits(kind: Kind, provenance: Provenance) -> bool:
    """Return True if the matrices of a checkpoint are stored in 8 bits."""
    encodings = set((provenance.quantized or "").split(", "))
    return kind == "firefox" or ("Q8_0" in encodings and encodings <= {"Q8_0", "F32", "F16", "BF16"})


def _write(export: Export, bits: int, is_default: bool, is_shortened: bool) -> Verification | Quantization:
    """Export a checkpoint; return its verification, or the measured loss if it is quantized.

    Fewer than 32 bits are a conversion of the verified float32 bundle, see `_convert`. With
    `is_shortened`, the bundle gets the shortlist of a Firefox model.
    """
    out = export.bundle
    with clear_disk_errors(out), ExitStack() as stages:

        def stage(name: str) -> Path:
            return stages.enter_context(temporary_sibling(out, name)) / out.resolve().name

        whole = stage("whole") if is_shortened else out
        float32 = whole if bits == FLOAT32_BITS else stage("float32")
        exported = export_checkpoint(dataclasses.replace(export, bundle=float32))
        if export.kind != "training":
            print(f"peak memory: {exported.peak_bytes / 1e6:.0f} MB", file=sys.stderr)
        if float32 != whole:
            projection: QuantScheme = "per-token" if is_shortened else "group-wise"
            _convert(float32, whole, exported.manifest, bits, is_default, projection)
        if is_shortened:
            shortlist_bundle(whole, out, lambda: firefox_candidates(export.checkpoint, exported.manifest), None)
    for note in exported.notes:
        print(f"note: {one_line(note)}", file=sys.stderr)
    manifest = read_manifest(out)
    print(f"{out}: {manifest.parameters:,} parameters, SHA-256 {manifest.digest}", flush=True)
    record = manifest.quantization or manifest.verification
    assert record is not None
    return record


def firefox_candidates(checkpoint: Path, manifest: Manifest) -> Candidates:
    """Read the shortlist of a Firefox model, which was imported with this manifest."""
    files, target_size = find_firefox_files(checkpoint), manifest.limits.vocabulary - 1  # without the start token
    source_size = manifest.limits.source_vocabulary or target_size
    is_shared = files.source_vocabulary == files.target_vocabulary
    assert files.shortlist is not None
    return parse_shortlist(read_file(files.shortlist), str(files.shortlist), source_size, target_size, is_shared)


def _convert(
    float32: Path, out: Path, original: Manifest, bits: int, is_default: bool, projection: QuantScheme
) -> None:
    """Convert a verified float32 bundle to fewer bits, as the command `quantize` does.

    A bundle that would lose too much raises `VerificationError`, and nothing is written; without
    the option `--bits` (`is_default`), it stays float32.
    """
    text = _sentences_of_language(float32, original)
    print(f"comparing {bits} bits with float32 on {len(text.texts)} texts", file=sys.stderr)
    try:
        if bits == HALF_BITS:
            half_bundle(float32, out, text, name=original.name)
        else:
            recipe = QuantizationRecipe(4 if bits == 4 else 8, projection=projection)
            quantize_bundle(float32, out, recipe, text, name=original.name)
    except VerificationError as error:
        if not is_default:
            raise VerificationError(
                f"{error}; nothing was written: --bits {FLOAT32_BITS} imports float32, which `sightline "
                "quantize` converts with these options"
            ) from None
        print(
            f"note: the bundle is float32: with {bits} bits, {error} (options of `sightline quantize`)", file=sys.stderr
        )
        with replacing(out) as new:
            for file in float32.iterdir():
                file.rename(new / file.name)


def _sentences_of_language(bundle: Path, manifest: Manifest) -> PlainText:
    """Return texts in the source language of a model that it can read, for measuring the loss."""
    is_english = manifest.languages is None or manifest.languages.source == "en"
    texts: Sequence[str] = sentences_of(manifest)
    if is_english:
        texts = list(numbered_sentences(DEFAULT_SENTENCES).values())
    tokenizer, limit = read_tokenizer(bundle / manifest.source_tokenizer), manifest.limits.max_source_tokens
    encoded = text_ids(manifest, tokenizer, texts)
    usable = [text for text, ids in zip(texts, encoded, strict=True) if len(ids) <= limit]
    if not usable:
        raise UsageError(
            f"the model reads at most {limit} tokens, too few for the texts that measure the loss of quantization; "
            f"import it with --bits {FLOAT32_BITS}"
        )
    return PlainText(usable)


def verify(options: VerifyOptions) -> Verification:
    """Compare a bundle with the checkpoint from which it was exported."""
    bundle = options.bundle
    manifest = read_bundle(bundle)  # its errors precede those of the checkpoint
    kind: Kind = options.kind or ("training" if manifest.origin is None else manifest.origin.kind)
    sentences = _usable_sentences(bundle, options.sentences, "--sentences") if kind == "training" else ()
    checks = ExportOptions(sentences=tuple(sentences), tolerance=options.tolerance)
    if options.checkpoint.suffix == ".gguf":
        with converted(options.checkpoint) as (folder, _):
            return verify_bundle(bundle, manifest, folder, checks, kind="huggingface")
    with run_checkpoint(options.checkpoint) as (checkpoint, note):
        _print_note(note)
        return verify_bundle(bundle, manifest, checkpoint, checks, kind=kind)


def align(options: AlignOptions) -> Alignment:
    """Choose the heads that align words in an existing bundle, and record them in its manifest."""
    bundle = options.bundle
    manifest, sentences = _read_for_heads(options)
    recorded, guided = manifest.alignment, None
    if recorded is not None and recorded.criterion == GUIDED:  # only the import knows the head
        guided = recorded.step, recorded.layer, recorded.heads[0]
    alignment = choose_alignment(open_sessions(bundle, manifest), bundle, sentences, guided)
    if alignment is None:
        raise BundleError(
            f"{bundle} cannot align words: it has no cross-attention, or no sentence has two words and fits its limits"
        )
    record_heads(bundle, alignment=alignment)
    return alignment


def coverage(options: CoverageOptions) -> Coverage:
    """Choose the head that shows omitted words in a bundle, and record it in its manifest."""
    bundle = options.bundle
    manifest, sentences = _read_for_heads(options)
    chosen = choose_coverage(open_sessions(bundle, manifest), bundle, sentences)
    if chosen is None:
        raise BundleError(
            f"{bundle} cannot show omitted words: it has no cross-attention, or fewer than two sentences fit its limits"
        )
    record_heads(bundle, coverage=chosen)
    return chosen


def _read_for_heads(options: AlignOptions) -> tuple[Manifest, Sequence[str]]:
    """Return the manifest of a bundle, and the sentences by which its heads are chosen."""
    bundle, path = options.bundle, options.sentences
    manifest = read_bundle(bundle)
    if manifest.dtype == "float16":
        raise BundleError(
            f"{bundle} is float16, which needs CUDA; choose heads in its float32 bundle and convert it again"
        )
    if path is None and manifest.origin is None and manifest.languages and manifest.languages.source == "en":
        path = DEFAULT_SENTENCES
    return manifest, () if path is None else _usable_sentences(bundle, path, "--sentences")


def quantize(options: QuantizeOptions) -> Quantization:
    text, recipe = _text(options), options.recipe
    if options.bits == HALF_BITS:
        return half_bundle(options.bundle, options.out, text, options.force)
    sentences: Sequence[str] = ()
    if "per-tensor" in recipe.schemes.values():
        sentences = _usable_sentences(options.bundle, options.calibration, "--calibration")
    return quantize_bundle(options.bundle, options.out, recipe, text, options.force, sentences)


def shortlist(options: ShortlistOptions) -> Shortlist:
    """Learn a shortlist from nine tenths of the texts, and measure its loss on the others."""
    bundle, manifest = options.bundle, read_bundle(options.bundle)
    if manifest.cross_attention is None:
        raise BundleError(f"{bundle} cannot have a shortlist: only encoder-decoder models with attention can")
    texts = _usable_sentences(bundle, options.texts, "--texts")
    held_out = texts[::HELD_OUT]
    learned = [text for number, text in enumerate(texts) if number % HELD_OUT]
    sources = text_ids(manifest, read_tokenizer(bundle / manifest.source_tokenizer), learned)
    print(f"translating {len(learned)} texts; the loss is measured on {len(held_out)} others", file=sys.stderr)
    sessions = open_sessions(bundle, manifest)
    return shortlist_bundle(bundle, options.out, lambda: learn_candidates(sessions, sources), PlainText(held_out))


def pack(options: PackOptions) -> Quantization:
    return pack_bundle(options.bundle, options.out, _text(options), options.force)


def _text(options: RewriteOptions) -> Text | None:
    """Return the text for measuring the loss, or None with `--unverified`."""
    if options.unverified:
        return None
    return _plain_text(options.bundle, options.texts) if options.data is None else _parallel_text(options, options.data)


def _plain_text(bundle: Path, path: Path | None) -> PlainText:
    """Return the texts of `--texts`, by default the English sentences of the load test."""
    languages = read_manifest(bundle).languages
    if path is None and languages is not None and languages.source != "en":
        raise UsageError(
            "measuring the loss needs text in the language of the model; name a file with one text per line with "
            "--texts or a folder of parallel text with --data, or use --unverified"
        )
    return PlainText(_usable_sentences(bundle, path, "--texts"))


def _parallel_text(options: RewriteOptions, data: Path) -> ParallelText:
    """Return the text of `--data`."""
    from sightline.model.evaluation.bleu import read_test_set

    split, target = options.split, options.target
    pairs = read_test_set(data, split, options.source, target, options.limit)
    manifest = read_manifest(options.bundle)
    limit, tokenizer = manifest.limits.max_source_tokens, read_tokenizer(options.bundle / manifest.source_tokenizer)
    encoded, path = encode_lines(tokenizer, pairs.sources), Path(f"{data / split}.{options.source}")
    _drop_too_long(limit, dict(enumerate(pairs.sources, 1)), encoded, path, "--data")
    if len(pairs.sources) < MIN_PAIRS:
        print(
            f"warning: {len(pairs.sources)} pairs are too few to distinguish a loss of {MAX_LOSS} BLEU from chance; "
            f"use at least {MIN_PAIRS}",
            file=sys.stderr,
        )
    return ParallelText(split, target, pairs)


def _usable_sentences(bundle: Path, path: Path | None, option: str) -> list[str]:
    path, manifest = path or DEFAULT_SENTENCES, read_manifest(bundle)
    numbered = numbered_sentences(path)
    tokenizer = read_tokenizer(bundle / manifest.source_tokenizer)
    encoded = text_ids(manifest, tokenizer, list(numbered.values()))
    return _drop_too_long(manifest.limits.max_source_tokens, numbered, encoded, path, option)


def _drop_too_long(
    limit: int, numbered: Mapping[int, str], encoded: Sequence[Sequence[int]], path: Path, option: str
) -> list[str]:
    """Return the sentences of a file that are not too long for the model.

    Others are skipped in the default file, which must keep a sentence, and a `ValueError` in a file
    that the user names.
    """
    too_long = {number: len(ids) for number, ids in zip(numbered, encoded, strict=True) if len(ids) > limit}
    if len(too_long) == len(numbered):
        raise ValueError(
            f"every sentence of {path} has more than {limit} tokens, the limit of the model; name a file with "
            f"shorter ones with {option}"
        )
    if too_long and path != DEFAULT_SENTENCES:
        number, tokens = next(iter(too_long.items()))
        raise ValueError(
            f"{path}, line {number} has {tokens} tokens, but the model reads at most {limit}; shorten or remove the "
            "line"
        )
    if too_long:
        print(
            f"note: skipped {len(too_long)} of {len(numbered)} sentences of {path} with more than {limit} tokens, the "
            f"limit of the model (lines {', '.join(map(str, too_long))}); name another file with {option}",
            file=sys.stderr,
        )
    return [sentence for number, sentence in numbered.items() if number not in too_long]
