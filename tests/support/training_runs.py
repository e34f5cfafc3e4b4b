"""Exports of training runs."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from sightline.base.bundle import Manifest, Verification
from sightline.base.bundle_files import read_bundle
from sightline.export import pipeline
from sightline.export.options import BundleMetadata, ExportOptions

# Result of a check that is omitted.
UNCHECKED = Verification(
    sentences=0,
    tolerance=0.0,
    max_logit_difference=0.0,
    max_attention_difference=0.0,
    different_generations=0,
    close_generations=0,
)


def omit_check(_export: object, _folder: object, manifest: Manifest, _guided: object) -> Manifest:
    """Take the place of `pipeline.check`."""
    return manifest.model_copy(update={"verification": UNCHECKED})


def export_bundle(
    checkpoint: Path,
    bundle: Path,
    metadata: BundleMetadata,
    sentences: Sequence[str],
    *,
    half_weights: bool = False,
    check: bool = True,
    tolerance: float | None = None,
) -> Manifest:
    """Export a training run.

    Args:
        checkpoint: folder of the run.
        bundle: folder to write.
        metadata: descriptive fields of the manifest.
        sentences: source sentences for the check, and for the choice of alignment heads.
        half_weights: round matrices to float16.
        check: compare the graphs with the checkpoint, and choose the heads that align words.
        tolerance: largest difference from the reference; 0 lets every check fail.
    """
    options = ExportOptions(half_weights=half_weights, sentences=tuple(sentences), tolerance=tolerance)
    with patch.object(pipeline, "check", pipeline.check if check else omit_check):
        return pipeline.export_checkpoint(pipeline.Export(checkpoint, bundle, metadata, options, "training")).manifest


def verify_bundle(bundle: Path, checkpoint: Path, sentences: Sequence[str]) -> Verification:
    checks = ExportOptions(sentences=tuple(sentences))
    return pipeline.verify_bundle(bundle, read_bundle(bundle), checkpoint, checks, kind="training")
