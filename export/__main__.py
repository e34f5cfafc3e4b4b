"""Command line for bundles: `python -m export CHECKPOINT --out BUNDLE`.

The commands `zoo`, `verify`, `quantize` and `half` take the place of CHECKPOINT.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from tokenizers import Tokenizer

from export.bundle import (
    BundleMetadata,
    chat_template,
    clean_up,
    export_bundle,
    half_bundle,
    quantize_bundle,
    verify_bundle,
)
from export.quality import MAX_LOSS, MIN_PAIRS, ParallelText
from export.quantize import BLOCK_SIZE, BLOCK_SIZES, Recipe
from export.verify import VerificationError, numbered_sentences
from model.checkpoint import load_parts
from model.data.tokenizer import encode_lines, read_tokenizer
from model.evaluation.bleu import read_test_set
from model.systems import SYSTEMS, bundle_name
from service.bundle import (
    BundleError,
    Languages,
    LayerGroup,
    Quantization,
    QuantScheme,
    Verification,
    read_manifest,
)

SENTENCES = Path(__file__).parents[1] / "tests" / "data" / "sentences.txt"
DEFAULT_SENTENCES = SENTENCES if SENTENCES.is_file() else None


def export(arguments: argparse.Namespace) -> Verification:
    clean_up(arguments.out)  # before the metadata of the existing bundle is read
    return _export(arguments, arguments.checkpoint, arguments.out, _metadata(arguments))


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
    system = SYSTEMS[name]
    corpus, chat = system.corpus, system.corpus.chat
    return BundleMetadata(
        bundle_name(name),
        system.description,
        corpus.license,
        languages=_languages(corpus.languages) if corpus.languages else None,
        chat=chat_template(chat) if chat else None,
    )


def _languages(codes: Sequence[str]) -> Languages:
    source, target = codes
    try:
        return Languages(source=source, target=target)
    except ValidationError:
        raise ValueError(f"languages must be ISO 639-1 codes such as en, got {source} and {target}") from None


def _export(arguments: argparse.Namespace, checkpoint: Path, bundle: Path, metadata: BundleMetadata) -> Verification:
    numbered = numbered_sentences(arguments.sentences)
    config, tokenizer = load_parts(checkpoint)
    sentences = _drop_too_long(config.max_positions, numbered, arguments.sentences, tokenizer, "--sentences")
    manifest = export_bundle(checkpoint, bundle, metadata, sentences, arguments.tolerance, arguments.half_weights)
    print(f"{bundle}: {manifest.parameters:,} parameters, SHA-256 {manifest.digest}", flush=True)
    assert manifest.verification is not None
    return manifest.verification


def _existing_metadata(bundle: Path, name: str) -> BundleMetadata:
    """Return the metadata of the existing bundle, or only the name if there is none."""
    try:
        manifest = read_manifest(bundle)
    except BundleError:
        return BundleMetadata(name)
    return BundleMetadata(name, manifest.description, manifest.license, manifest.languages, manifest.chat)


def _metadata(arguments: argparse.Namespace) -> BundleMetadata:
    present = _existing_metadata(arguments.out, arguments.name or arguments.out.resolve().name)
    given: dict[str, Any] = {name: getattr(arguments, name) for name in ("description", "license")}
    given["languages"] = _languages(arguments.languages) if arguments.languages else None
    return dataclasses.replace(present, **{name: value for name, value in given.items() if value is not None})


def verify(arguments: argparse.Namespace) -> Verification:
    sentences = _usable_sentences(arguments.bundle, arguments.sentences, "--sentences")
    return verify_bundle(arguments.bundle, arguments.checkpoint, sentences, arguments.tolerance)


def quantize(arguments: argparse.Namespace) -> Quantization:
    text = _parallel_text(arguments)
    recipe = Recipe(arguments.bits, arguments.block_size, arguments.encoder, arguments.layers, arguments.projection)
    sentences: Sequence[str] = ()
    if "static" in recipe.schemes.values() and arguments.calibration is not None:
        sentences = _usable_sentences(arguments.bundle, arguments.calibration, "--calibration")
    return quantize_bundle(arguments.bundle, arguments.out, recipe, text, arguments.force, sentences)


def half(arguments: argparse.Namespace) -> Quantization:
    return half_bundle(arguments.bundle, arguments.out, _parallel_text(arguments), arguments.force)


def _parallel_text(arguments: argparse.Namespace) -> ParallelText | None:
    """Return the text for measuring BLEU, or None with `--unverified`."""
    if arguments.unverified:
        return None
    split, target = arguments.split, arguments.target
    pairs = read_test_set(arguments.data, split, arguments.source, target, arguments.limit)
    limit, tokenizer = _source_limit(arguments.bundle)
    too_long = _too_long(limit, dict(enumerate(pairs.sources, start=1)), tokenizer)
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
    return _drop_too_long(limit, numbered_sentences(path), path, tokenizer, option)


def _drop_too_long(limit: int, numbered: Mapping[int, str], path: Path, tokenizer: Tokenizer, option: str) -> list[str]:
    """Return the sentences of a file that are not too long for the model.

    Sentences of the default file that are too long are skipped. In a file that the user names, they
    are an error.

    Raises:
        ValueError: a sentence of the user's file is too long, or all sentences of the default file
            are.
    """
    too_long = _too_long(limit, numbered, tokenizer)
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


def _too_long(limit: int, numbered: Mapping[int, str], tokenizer: Tokenizer) -> dict[int, int]:
    """Return the token counts above the limit, by line number."""
    lengths = (len(ids) for ids in encode_lines(tokenizer, list(numbered.values())))
    return {number: length for number, length in zip(numbered, lengths, strict=True) if length > limit}


def export_parser(parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Add the options of the export to a parser, by default to that of `python -m export`."""
    parser = parser or argparse.ArgumentParser(
        prog="python -m export",
        usage="%(prog)s [zoo | verify | quantize | half] ...\n       %(prog)s [options] --out BUNDLE checkpoint",
    )
    parser.description = "Export a checkpoint as a bundle, and verify it against PyTorch before it is written."
    parser.epilog = "example: %(prog)s runs/multi30k-en-de/averaged --out bundles/multi30k-en-de"
    parser.add_argument("checkpoint", type=Path, help="folder that training wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="folder to write or replace")
    parser.add_argument("--name", help="model name in requests (default: the folder name of BUNDLE)")
    parser.add_argument("--description", help="description of the model (default: that of the existing bundle)")
    parser.add_argument("--license", help="license of the weights (default: that of the existing bundle)")
    parser.add_argument(
        "--languages",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="ISO 639-1 codes of source and target language (default: those of the existing bundle)",
    )
    _add_export(parser)
    parser.set_defaults(action=export)
    return parser


def zoo_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export zoo", description="Export all finished runs of `python -m model zoo`."
    )
    parser.add_argument("runs", type=Path, help="parent folder of the runs")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLES", help="parent folder of the bundles")
    parser.add_argument(
        "--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help="export only these"
    )
    _add_export(parser)
    parser.set_defaults(action=zoo)
    return parser


def verify_parser(parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Add the options of the verification to a parser, by default to that of `python -m export`."""
    parser = parser or argparse.ArgumentParser(prog="python -m export verify")
    parser.description = "Compare a bundle in ONNX Runtime with a checkpoint in PyTorch."
    parser.epilog = "example: %(prog)s bundles/multi30k-en-de --checkpoint runs/multi30k-en-de/averaged"
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="folder of the checkpoint from which it was exported"
    )
    _add_verification(parser)
    parser.set_defaults(action=verify)
    return parser


def quantize_parser(parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Add the options of the quantization to a parser, by default to that of `python -m export`."""
    parser = parser or argparse.ArgumentParser(prog="python -m export quantize")
    parser.description = "Quantize a float32 bundle to 8-bit or 4-bit weights, and measure the loss of BLEU."
    parser.epilog = (
        "example: %(prog)s bundles/multi30k-en-de --out bundles/multi30k-en-de-int8 --bits 8 --data data/multi30k"
    )
    _add_rewriting(parser)
    parser.add_argument("--bits", type=int, choices=BLOCK_SIZES, required=True, help="bits per weight")
    parser.add_argument(
        "--block-size",
        type=int,
        default=0,
        help="weights that share a scale with the scheme blocks ("
        + ", ".join(f"default with {bits} bits: {size}" for bits, size in BLOCK_SIZE.items())
        + ")",
    )
    for layer_group in get_args(LayerGroup):
        parser.add_argument(
            f"--{layer_group}",
            choices=get_args(QuantScheme),
            default="blocks",
            help="quantization scheme: blocks is group-wise, rows is dynamic per-token, static is static per-tensor "
            "(default: blocks)",
        )
    parser.add_argument(
        "--calibration",
        type=Path,
        default=DEFAULT_SENTENCES,
        help="file with one sentence per line for the scheme static, independent of --data and --limit (default: "
        "tests/data/sentences.txt of the repository, without sentences that are too long)",
    )
    parser.set_defaults(action=quantize)
    return parser


def half_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export half",
        description="Convert a float32 bundle to float16 for CUDA and compare their BLEU.",
    )
    _add_rewriting(parser)
    parser.set_defaults(action=half)
    return parser


def _add_rewriting(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the commands that convert a float32 bundle."""
    parser.add_argument("bundle", type=Path, help="float32 bundle folder")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="folder to write or replace")
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--data", type=Path, metavar="FOLDER", help="folder of parallel text for measuring BLEU")
    measured.add_argument("--unverified", action="store_true", help="do not measure BLEU; the manifest records it")
    parser.add_argument("--split", default="val", help="first part of the file names (default: val)")
    parser.add_argument("--source", default="en", help="language of the sentences (default: en)")
    parser.add_argument("--target", default="de", help="language of the translations (default: de)")
    parser.add_argument(
        "--limit",
        type=int,
        help=f"use only the first LIMIT pairs; fewer than {MIN_PAIRS} cannot show a loss of {MAX_LOSS} BLEU",
    )
    parser.add_argument(
        "--force", action="store_true", help=f"write the bundle even if it loses more than {MAX_LOSS} BLEU"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--half-weights",
        action="store_true",
        help="store matrices as float16, which halves the files; computation stays float32",
    )
    _add_verification(parser)


def _add_verification(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sentences",
        type=Path,
        default=DEFAULT_SENTENCES,
        required=DEFAULT_SENTENCES is None,
        help="file with one source sentence per line for the verification",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest allowed difference from PyTorch in float64 (default: derived from float32 rounding)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `python -m export` and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    others: dict[str, Callable[[], argparse.ArgumentParser]] = {
        "zoo": zoo_parser,
        "verify": verify_parser,
        "quantize": quantize_parser,
        "half": half_parser,
    }
    if words and words[0] in others:
        return run(others[words[0]](), words[1:])
    return run(export_parser(), words)


def run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Run the command of a parser and return the exit code.

    The code is 0 on success, 1 if a bundle differs by more than the tolerance, and 2 if the
    arguments cannot be used.
    """
    parsed = parser.parse_args(arguments)
    try:
        record = parsed.action(parsed)
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, BundleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(record.model_dump_json(indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
