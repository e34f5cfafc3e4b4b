"""`python -m export CHECKPOINT --out BUNDLE` and `python -m export verify BUNDLE --checkpoint CHECKPOINT`."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from export.bundle import Label, export_bundle, verify_bundle
from export.verify import TOLERANCE, VerificationError, read_sentences
from service.bundle import BundleError, Verification, read_manifest

SENTENCES = Path(__file__).parents[1] / "tests" / "data" / "sentences.txt"


def export(arguments: argparse.Namespace) -> Verification:
    label = _label(arguments, _present_label(arguments.out))
    sentences = read_sentences(arguments.sentences)
    manifest = export_bundle(arguments.checkpoint, arguments.out, label, sentences, arguments.tolerance)
    print(f"{arguments.out}: {manifest.parameters:,} parameters, SHA-256 {manifest.digest}")
    assert manifest.verification is not None
    return manifest.verification


def _present_label(bundle: Path) -> Label:
    """What the bundle that is to be replaced says of itself; nothing where there is none that can be read."""
    try:
        manifest = read_manifest(bundle)
    except BundleError:
        return Label(bundle.resolve().name)
    return Label(bundle.resolve().name, manifest.description, manifest.license)


def _label(arguments: argparse.Namespace, present: Label) -> Label:
    given = {name: getattr(arguments, name) for name in ("name", "description", "license")}
    return dataclasses.replace(present, **{name: text for name, text in given.items() if text is not None})


def verify(arguments: argparse.Namespace) -> Verification:
    sentences = read_sentences(arguments.sentences)
    return verify_bundle(arguments.bundle, arguments.checkpoint, sentences, arguments.tolerance)


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description="Write the bundle of a checkpoint, verified against PyTorch before it is put in its place.",
        epilog="`python -m export verify --help` is about the other command; a checkpoint of that name is ./verify.",
    )
    parser.add_argument("checkpoint", type=Path, help="folder that training wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="folder to write or replace")
    parser.add_argument("--name", help="what requests call the model (default: the name of BUNDLE)")
    parser.add_argument("--description", help="one sentence for people (default: that of the bundle it replaces)")
    parser.add_argument("--license", help="of the weights, not of the code (default: that of the bundle it replaces)")
    _add_verification(parser)
    parser.set_defaults(action=export)
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


def _add_verification(parser: argparse.ArgumentParser) -> None:
    found = SENTENCES if SENTENCES.is_file() else None
    parser.add_argument(
        "--sentences", type=Path, default=found, required=found is None, help="one source sentence a line"
    )
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest difference allowed")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 on success, 1 where ONNX Runtime and PyTorch differ, 2 where the caller asked for what cannot be done."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed = verify_parser().parse_args(words[1:]) if words[:1] == ["verify"] else export_parser().parse_args(words)
    try:
        verification = parsed.action(parsed)
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, BundleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(verification.model_dump_json(indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
