"""Verification of bundles of models in PyTorch that have a description."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from sightline.base.bundle import Verification
from sightline.base.bundle_files import read_manifest
from sightline.export.check.verify import verify
from sightline.export.families import trained
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.transformer import Transformer
from tests.support.tensors import state_tensors


def verify_trained(
    bundle: Path,
    model: Transformer | Classifier | CausalModel,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    tolerance: float | None = None,
) -> Verification:
    """Compare a bundle with the weights of a model."""
    described = trained.describe(model.config, state_tensors(model))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    return verify(bundle, read_manifest(bundle), *described, ids, tolerance)
