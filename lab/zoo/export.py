"""Export of the trained systems to bundles."""

import argparse
from dataclasses import replace

from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.base.bundle import Verification
from sightline.base.bundle_files import read_manifest
from sightline.export.describe import PLAIN_DIALOGUES
from sightline.export.import_errors import VerificationError
from sightline.export.options import BundleMetadata, ExportOptions, languages_of
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.writing import clear_disk_errors
from sightline.model.data.text import numbered_sentences
from sightline.model.data.tokenizer_training import encode_lines
from sightline.model.parts import load_parts


def export(arguments: argparse.Namespace) -> Verification:
    """Export the finished first run of each system, and return the verification of the last one. A
    bundle that fails verification does not prevent the export of the others.
    """
    names = [name for name in arguments.systems if (arguments.runs / f"{name}-1" / "scores.json").exists()]
    if not names:
        raise FileNotFoundError(
            f"{arguments.runs} has no finished run (NAME-1/scores.json); train with python -m lab.zoo train"
        )
    failures, sentences = [], list(numbered_sentences(arguments.sentences).values())
    for name in names:
        metadata = replace(metadata_of(name), lazy=arguments.lazy)
        checkpoint = arguments.runs / f"{name}-1" / "averaged"
        config, tokenizer = load_parts(checkpoint)
        lengths = map(len, encode_lines(tokenizer, sentences))
        usable = [text for text, length in zip(sentences, lengths, strict=True) if length <= config.max_positions]
        options = ExportOptions(
            half_weights=arguments.half_weights, sentences=tuple(usable), tolerance=arguments.tolerance
        )
        bundle = arguments.out / metadata.name
        try:
            with clear_disk_errors(bundle):
                export_checkpoint(Export(checkpoint, bundle, metadata, options, "training"))
        except VerificationError as error:
            failures.append(f"{name}: {error}")
            continue
        manifest = read_manifest(bundle)
        print(f"{bundle}: {manifest.parameters:,} parameters, SHA-256 {manifest.digest}", flush=True)
    if failures:
        raise VerificationError("; ".join(failures))
    assert manifest.verification is not None
    return manifest.verification


def metadata_of(name: str) -> BundleMetadata:
    """Return the metadata of the bundle of a system."""
    corpus = (system := SYSTEMS[name]).corpus
    return BundleMetadata(
        bundle_name(name),
        f"{system.description}. {corpus.limits}",
        corpus.license,
        languages=languages_of(corpus.languages) if corpus.languages else None,
        chat=PLAIN_DIALOGUES if corpus.chat else None,
        training_unit="text" if corpus.derived == "joined" else None,
    )
