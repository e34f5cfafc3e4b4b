"""`python -m export CHECKPOINT --out BUNDLE`; `zoo`, `verify`, and for bundles in other forms `quantize` and `half`."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from tokenizers import Tokenizer

from export.bundle import Label, chat_template, clean_up, export_bundle, half_bundle, quantize_bundle, verify_bundle
from export.quality import MAX_LOSS, MIN_PAIRS, ParallelText
from export.quantize import BLOCK_SIZE, BLOCK_SIZES, Recipe
from export.verify import VerificationError, numbered_sentences
from model.checkpoint import load_parts
from model.data.tokenizer import encode_lines, read_tokenizer
from model.evaluation.bleu import read_test_set
from model.systems import SYSTEMS, bundle_name
from service.bundle import (
    BundleError,
    Form,
    Languages,
    Quantization,
    Site,
    Verification,
    read_manifest,
)

SENTENCES = Path(__file__).parents[1] / "tests" / "data" / "sentences.txt"
FOUND_SENTENCES = SENTENCES if SENTENCES.is_file() else None


def export(arguments: argparse.Namespace) -> Verification:
    clean_up(arguments.out)  # before the label of the bundle that is replaced is read
    return _export(arguments, arguments.checkpoint, arguments.out, _label(arguments))


def zoo(arguments: argparse.Namespace) -> Verification:
    """Systems' first runs that are finished; the last one's verification. One that is refused keeps no other back."""
    names = [name for name in arguments.systems if (arguments.runs / f"{name}-1" / "scores.json").exists()]
    if not names:
        raise FileNotFoundError(f"no finished run in {arguments.runs}: there is no NAME-1/scores.json")
    refused = []
    for name in names:
        label = _zoo_label(name)
        checkpoint = arguments.runs / f"{name}-1" / "averaged"
        try:
            verification = _export(arguments, checkpoint, arguments.out / label.name, label)
        except VerificationError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise VerificationError("; ".join(refused))
    return verification


def _zoo_label(name: str) -> Label:
    system = SYSTEMS[name]
    corpus, chat = system.corpus, system.corpus.chat
    return Label(
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
        raise ValueError(f"languages {source} and {target}: each is an ISO 639-1 code, such as en") from None


def _export(arguments: argparse.Namespace, checkpoint: Path, bundle: Path, label: Label) -> Verification:
    numbered = numbered_sentences(arguments.sentences)
    config, tokenizer = load_parts(checkpoint)
    sentences = _within(config.max_positions, numbered, arguments.sentences, tokenizer, "--sentences")
    manifest = export_bundle(checkpoint, bundle, label, sentences, arguments.tolerance, arguments.half_weights)
    print(f"{bundle}: {manifest.parameters:,} parameters, SHA-256 {manifest.digest}", flush=True)
    assert manifest.verification is not None
    return manifest.verification


def _present_label(bundle: Path, name: str) -> Label:
    """What the bundle that is to be replaced says of itself; nothing where there is none that can be read."""
    try:
        manifest = read_manifest(bundle)
    except BundleError:
        return Label(name)
    return Label(name, manifest.description, manifest.license, manifest.languages, manifest.chat)


def _label(arguments: argparse.Namespace) -> Label:
    present = _present_label(arguments.out, arguments.name or arguments.out.resolve().name)
    given: dict[str, Any] = {name: getattr(arguments, name) for name in ("description", "license")}
    given["languages"] = _languages(arguments.languages) if arguments.languages else None
    return dataclasses.replace(present, **{name: value for name, value in given.items() if value is not None})


def verify(arguments: argparse.Namespace) -> Verification:
    sentences = _readable(arguments.bundle, arguments.sentences, "--sentences")
    return verify_bundle(arguments.bundle, arguments.checkpoint, sentences, arguments.tolerance)


def quantize(arguments: argparse.Namespace) -> Quantization:
    text = _parallel_text(arguments)
    recipe = Recipe(arguments.bits, arguments.block_size, arguments.encoder, arguments.layers, arguments.projection)
    sentences: Sequence[str] = ()
    if "static" in recipe.forms.values() and arguments.calibration is not None:
        sentences = _readable(arguments.bundle, arguments.calibration, "--calibration")
    return quantize_bundle(arguments.bundle, arguments.out, recipe, text, arguments.force, sentences)


def half(arguments: argparse.Namespace) -> Quantization:
    return half_bundle(arguments.bundle, arguments.out, _parallel_text(arguments), arguments.force)


def _parallel_text(arguments: argparse.Namespace) -> ParallelText | None:
    """What to measure on; None where nothing is to be measured."""
    if arguments.unverified:
        return None
    split, target = arguments.split, arguments.target
    pairs = read_test_set(arguments.data, split, arguments.source, target, arguments.limit)
    limit, tokenizer = _reader(arguments.bundle)
    too_long = _too_long(limit, dict(enumerate(pairs.sources, start=1)), tokenizer)
    if too_long:
        number, tokens = next(iter(too_long.items()))
        raise ValueError(
            f"{arguments.data / split}.{arguments.source}, line {number} has {tokens} tokens, the model reads {limit}; "
            "remove the pair, or choose others with --split or --limit"
        )
    if len(pairs.sources) < MIN_PAIRS:
        print(
            f"warning: {len(pairs.sources)} pairs are too few to tell a loss of {MAX_LOSS} BLEU from chance; measure "
            f"on {MIN_PAIRS} or more",
            file=sys.stderr,
        )
    return ParallelText(split, target, pairs)


def _reader(bundle: Path) -> tuple[int, Tokenizer]:
    """Return how many tokens a bundle reads, and what makes them."""
    manifest = read_manifest(bundle)
    return manifest.limits.max_source_tokens, read_tokenizer(bundle / manifest.source_tokenizer)


def _readable(bundle: Path, path: Path, option: str) -> list[str]:
    limit, tokenizer = _reader(bundle)
    return _within(limit, numbered_sentences(path), path, tokenizer, option)


def _within(limit: int, numbered: Mapping[int, str], path: Path, tokenizer: Tokenizer, option: str) -> list[str]:
    """Return the sentences of a file that have no more tokens than the model reads.

    The project's own sentences are for every model: those that are too long for this one are left out. A file that the
    user names is taken as it is.

    Raises:
        ValueError: a sentence of a file that the user names is too long, or every sentence is.
    """
    too_long = _too_long(limit, numbered, tokenizer)
    if len(too_long) == len(numbered):
        raise ValueError(
            f"every sentence of {path} has more than the {limit} tokens that the model reads; name shorter "
            f"ones with {option}"
        )
    if too_long and path != FOUND_SENTENCES:
        number, tokens = next(iter(too_long.items()))
        place = list(numbered).index(number) + 1
        raise ValueError(
            f"{path}, line {number}: sentence {place} has {tokens} tokens, the model reads {limit}; shorten it or "
            "remove the line"
        )
    if too_long:
        print(
            f"note: {len(too_long)} of the {len(numbered)} sentences of {path} are left out: they have more than the "
            f"{limit} tokens that the model reads (lines {', '.join(map(str, too_long))}); name others with {option}",
            file=sys.stderr,
        )
    return [sentence for number, sentence in numbered.items() if number not in too_long]


def _too_long(limit: int, numbered: Mapping[int, str], tokenizer: Tokenizer) -> dict[int, int]:
    """Return the numbers of tokens that exceed the limit, by the number of the line."""
    lengths = (len(ids) for ids in encode_lines(tokenizer, list(numbered.values())))
    return {number: length for number, length in zip(numbered, lengths, strict=True) if length > limit}


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description="Write the bundle of a checkpoint, verified against PyTorch before it is put in its place.",
        epilog="`python -m export verify --help` is about another command, so are `zoo`, `quantize` and `half`; a "
        "checkpoint of such a name is ./verify.",
    )
    parser.add_argument("checkpoint", type=Path, help="folder that training wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="folder to write or replace")
    parser.add_argument("--name", help="what requests call the model (default: the name of BUNDLE)")
    parser.add_argument("--description", help="one sentence for people (default: that of the bundle it replaces)")
    parser.add_argument("--license", help="of the weights, not of the code (default: that of the bundle it replaces)")
    parser.add_argument(
        "--languages",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="ISO 639-1 codes of what is translated, and into what (default: those of the bundle it replaces)",
    )
    _add_export(parser)
    parser.set_defaults(action=export)
    return parser


def zoo_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export zoo", description="Write the bundles of all that `python -m model zoo` has trained."
    )
    parser.add_argument("runs", type=Path, help="folder of runs")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLES", help="folder of folders to write")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help="of these")
    _add_export(parser)
    parser.set_defaults(action=zoo)
    return parser


def verify_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export verify", description="Compare a bundle in ONNX Runtime with a checkpoint in PyTorch."
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    _add_verification(parser)
    parser.set_defaults(action=verify)
    return parser


def quantize_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export quantize",
        description="Write a float32 bundle again with 8-bit or 4-bit weights, compared with it by BLEU on real text.",
    )
    _add_rewriting(parser)
    parser.add_argument("--bits", type=int, choices=BLOCK_SIZES, required=True)
    parser.add_argument(
        "--block-size",
        type=int,
        default=0,
        help=", ".join(f"default with {bits} bits: {size}" for bits, size in BLOCK_SIZE.items()),
    )
    for site in get_args(Site):
        parser.add_argument(f"--{site}", choices=get_args(Form), default="blocks", help="form of its products")
    parser.add_argument(
        "--calibration",
        type=Path,
        default=FOUND_SENTENCES,
        help="file with one sentence a line, for the scales of static products; --data and --limit do not choose it "
        "(default: the repository's own sentences, without those that are too long for the model)",
    )
    parser.set_defaults(action=quantize)
    return parser


def half_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export half",
        description="Write a float32 bundle again in float16, for CUDA, compared with it by BLEU on real text.",
    )
    _add_rewriting(parser)
    parser.set_defaults(action=half)
    return parser


def _add_rewriting(parser: argparse.ArgumentParser) -> None:
    """What the commands take that write a float32 bundle in another form."""
    parser.add_argument("bundle", type=Path, help="float32")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="folder to write or replace")
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--data", type=Path, metavar="FOLDER", help="of parallel text, as for training")
    measured.add_argument("--unverified", action="store_true", help="measure nothing; the manifest says so")
    parser.add_argument("--split", default="val")
    parser.add_argument("--source", default="en", help="language of the sentences")
    parser.add_argument("--target", default="de", help="language of their translations")
    parser.add_argument(
        "--limit",
        type=int,
        help=f"measure on the first LIMIT pairs alone; fewer than {MIN_PAIRS} cannot show a loss of {MAX_LOSS} BLEU",
    )
    parser.add_argument("--force", action="store_true", help=f"write even if more than {MAX_LOSS} BLEU are lost")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--half-weights", action="store_true", help="round matrices to float16; all is still computed in float32"
    )
    _add_verification(parser)


def _add_verification(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sentences",
        type=Path,
        default=FOUND_SENTENCES,
        required=FOUND_SENTENCES is None,
        help="one source sentence a line",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference from PyTorch in float64 (default: what float32 rounding explains in this model)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 on success, 1 where a bundle differs by more than is allowed, 2 where what was asked for cannot be done."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    others = {"zoo": zoo_parser, "verify": verify_parser, "quantize": quantize_parser, "half": half_parser}
    if words and words[0] in others:
        parsed = others[words[0]]().parse_args(words[1:])
    else:
        parsed = export_parser().parse_args(words)
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
