"""Actions of the commands that need PyTorch or ONNX Runtime.

PyTorch is imported only by the actions that need it: converting a bundle needs it only for BLEU.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from export.convert.bundles import Text, half_bundle, quantize_bundle
from export.convert.quality import ParallelText
from export.convert.text_quality import PlainText, text_ids
from export.errors import VerificationError
from export.options import (
    DEFAULT_SENTENCES,
    MAX_LOSS,
    MIN_PAIRS,
    BundleMetadata,
    Recipe,
    languages_of,
    metadata_of,
)
from export.writing import clean_up
from model.data.text import numbered_sentences
from model.data.tokenizer import encode_lines, read_tokenizer
from service.bundle import Alignment, BundleError, Ops, Quantization, Verification, read_bundle, read_manifest


def export(arguments: argparse.Namespace) -> Verification:
    clean_up(arguments.out)  # before the metadata of the existing bundle is read
    return _export(arguments, arguments.checkpoint, arguments.out, metadata_of(arguments), arguments.ops)


def zoo(arguments: argparse.Namespace) -> Verification:
    """Export the finished first run of each system, and return the verification of the last one.

    A bundle that fails verification does not prevent the export of the others.
    """
    names = [name for name in arguments.systems if (arguments.runs / f"{name}-1" / "scores.json").exists()]
    if not names:
        raise FileNotFoundError(
            f"{arguments.runs} has no finished run (NAME-1/scores.json); train with python -m model zoo"
        )
    failures = []
    for name in names:
        label = _zoo_metadata(name)
        checkpoint = arguments.runs / f"{name}-1" / "averaged"
        try:
            verification = _export(arguments, checkpoint, arguments.out / label.name, label)
        except VerificationError as error:
            failures.append(f"{name}: {error}")
    if failures:
        raise VerificationError("; ".join(failures))
    return verification


def _zoo_metadata(name: str) -> BundleMetadata:
    from export.bundle import chat_template
    from model.systems import SYSTEMS, bundle_name

    system = SYSTEMS[name]
    corpus, chat = system.corpus, system.corpus.chat
    return BundleMetadata(
        bundle_name(name),
        system.description,
        corpus.license,
        languages=languages_of(corpus.languages) if corpus.languages else None,
        chat=chat_template(chat) if chat else None,
    )


def _export(
    arguments: argparse.Namespace, checkpoint: Path, bundle: Path, metadata: BundleMetadata, ops: Ops = "contrib"
) -> Verification:
    from export.bundle import export_bundle
    from model.checkpoint import load_parts

    numbered = numbered_sentences(_named(arguments.sentences))
    config, tokenizer = load_parts(checkpoint)
    lengths = _lengths(numbered, tokenizer)
    sentences = _drop_too_long(config.max_positions, numbered, lengths, arguments.sentences, "--sentences")
    tolerance, half_weights = arguments.tolerance, arguments.half_weights
    manifest = export_bundle(checkpoint, bundle, metadata, sentences, tolerance, half_weights, ops)
    print(f"{bundle}: {manifest.parameters:,} parameters, SHA-256 {manifest.digest}", flush=True)
    assert manifest.verification is not None
    return manifest.verification


def _named(sentences: Path | None) -> Path:
    if sentences is None:
        raise ValueError("the verification needs sentences; name a file with one source sentence per line, --sentences")
    return sentences


def verify(arguments: argparse.Namespace) -> Verification:
    from export.bundle import verify_bundle

    sentences = _usable_sentences(arguments.bundle, _named(arguments.sentences), "--sentences")
    return verify_bundle(arguments.bundle, arguments.checkpoint, sentences, arguments.tolerance)


def align(arguments: argparse.Namespace) -> Alignment:
    """Choose the heads that align words in an existing bundle, and record them in its manifest."""
    from export.check.alignment import GUIDED, choose_alignment, record_alignment
    from export.check.sessions import open_sessions

    bundle: Path = arguments.bundle
    manifest = read_bundle(bundle)
    if manifest.dtype == "float16":
        raise BundleError(f"{bundle} is float16, which needs CUDA; align its float32 bundle and convert it again")
    path: Path | None = arguments.sentences
    if path is None and manifest.origin is None and manifest.languages and manifest.languages.source == "en":
        path = DEFAULT_SENTENCES
    sentences = () if path is None else _usable_sentences(bundle, path, "--sentences")
    recorded, guided = manifest.alignment, None
    if recorded is not None and recorded.criterion == GUIDED:  # only the import knows the head
        guided = recorded.layer, recorded.heads[0]
    alignment = choose_alignment(open_sessions(bundle, manifest), bundle, sentences, guided)
    if alignment is None:
        raise BundleError(
            f"{bundle} cannot align words: it has no cross-attention, or no sentence has two words and fits its limits"
        )
    record_alignment(bundle, alignment)
    return alignment


def quantize(arguments: argparse.Namespace) -> Quantization:
    text = _text(arguments)
    recipe = Recipe(arguments.bits, arguments.block_size, arguments.encoder, arguments.layers, arguments.projection)
    sentences: Sequence[str] = ()
    if "per-tensor" in recipe.schemes.values() and arguments.calibration is not None:
        sentences = _usable_sentences(arguments.bundle, arguments.calibration, "--calibration")
    return quantize_bundle(arguments.bundle, arguments.out, recipe, text, arguments.force, sentences)


def half(arguments: argparse.Namespace) -> Quantization:
    return half_bundle(arguments.bundle, arguments.out, _text(arguments), arguments.force)


def _text(arguments: argparse.Namespace) -> Text | None:
    """Return the text for measuring the loss, or None with `--unverified`."""
    if arguments.unverified:
        return None
    return _plain_text(arguments) if arguments.data is None else _parallel_text(arguments)


def _plain_text(arguments: argparse.Namespace) -> PlainText:
    """Return the texts of `--texts`, by default the English sentences of the repository."""
    manifest = read_manifest(arguments.bundle)
    path: Path | None = arguments.texts
    if path is None:
        path = DEFAULT_SENTENCES
        if path is None or (manifest.languages is not None and manifest.languages.source != "en"):
            raise ValueError(
                "measuring the loss needs text in the language of the model; name a file with one text per line with "
                "--texts or a folder of parallel text with --data, or use --unverified"
            )
    numbered = numbered_sentences(path)
    tokenizer = read_tokenizer(arguments.bundle / manifest.source_tokenizer)
    encoded = text_ids(manifest, tokenizer, list(numbered.values()))
    lengths = dict(zip(numbered, map(len, encoded), strict=True))
    return PlainText(_drop_too_long(manifest.limits.max_source_tokens, numbered, lengths, path, "--texts"))


def _parallel_text(arguments: argparse.Namespace) -> ParallelText:
    """Return the text of `--data`."""
    from model.evaluation.bleu import read_test_set

    split, target = arguments.split, arguments.target
    pairs = read_test_set(arguments.data, split, arguments.source, target, arguments.limit)
    limit, tokenizer = _source_limit(arguments.bundle)
    too_long = _too_long(limit, _lengths(dict(enumerate(pairs.sources, start=1)), tokenizer))
    if too_long:
        number, tokens = next(iter(too_long.items()))
        raise ValueError(
            f"{arguments.data / split}.{arguments.source}, line {number} has {tokens} tokens, but the model reads at "
            f"most {limit}; remove the pair, or choose other pairs with --split or --limit"
        )
    if len(pairs.sources) < MIN_PAIRS:
        print(
            f"warning: {len(pairs.sources)} pairs are too few to distinguish a loss of {MAX_LOSS} BLEU from chance; "
            f"use at least {MIN_PAIRS}",
            file=sys.stderr,
        )
    return ParallelText(split, target, pairs)


def _source_limit(bundle: Path) -> tuple[int, Tokenizer]:
    """Return the largest number of source tokens of a bundle, and its source tokenizer."""
    manifest = read_manifest(bundle)
    return manifest.limits.max_source_tokens, read_tokenizer(bundle / manifest.source_tokenizer)


def _usable_sentences(bundle: Path, path: Path, option: str) -> list[str]:
    limit, tokenizer = _source_limit(bundle)
    numbered = numbered_sentences(path)
    return _drop_too_long(limit, numbered, _lengths(numbered, tokenizer), path, option)


def _drop_too_long(
    limit: int, numbered: Mapping[int, str], lengths: Mapping[int, int], path: Path, option: str
) -> list[str]:
    """Return the sentences of a file that are not too long for the model.

    Sentences of the default file that are too long are skipped. In a file that the user names, they
    are an error.

    Raises:
        ValueError: a sentence of the user's file is too long, or all sentences of the default file
            are.
    """
    too_long = _too_long(limit, lengths)
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


def _lengths(numbered: Mapping[int, str], tokenizer: Tokenizer) -> dict[int, int]:
    """Return token counts by line number."""
    encoded = encode_lines(tokenizer, list(numbered.values()))
    return dict(zip(numbered, map(len, encoded), strict=True))


def _too_long(limit: int, lengths: Mapping[int, int]) -> dict[int, int]:
    """Return the token counts above the limit, by line number."""
    return {number: length for number, length in lengths.items() if length > limit}
