"""Tests of the bundle of a classifier."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import MANIFEST, BundleError
from sightline.base.bundle_files import read_bundle, read_manifest
from sightline.export.check.sessions import Array, encode, open_session, open_sessions
from sightline.export.convert.conversions import half_bundle
from sightline.export.import_errors import VerificationError
from sightline.model.architectures.classifier import Classifier
from sightline.model.checkpoint import load_model
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.parts import TOKENIZER
from tests.export.verified import verify_trained
from tests.support.training_runs import verify_bundle


def test_a_classifier_bundle_has_an_encoder_and_labels_and_no_decoder(classifier_bundle: Path) -> None:
    manifest = read_bundle(classifier_bundle)
    assert manifest.decoder is None
    assert json.loads((classifier_bundle / MANIFEST).read_text(encoding="utf-8"))["decoder"] is None
    assert manifest.states == ()
    assert manifest.labels == ("bad", "fair", "good")
    assert manifest.tasks == ("encode", "attention", "classify")
    assert [(one.kind, one.layers, one.heads) for one in manifest.attention] == [("encoder", 2, 2)]
    assert set(manifest.files) == {"encoder.onnx", "weights.bin", "tokenizer.json"}
    assert {path.name for path in classifier_bundle.iterdir()} == {*manifest.files, MANIFEST}


def test_verification_reports_the_difference_to_pytorch(classifier_bundle: Path, classifier_checkpoint: Path) -> None:
    written = read_manifest(classifier_bundle).verification
    assert written is not None
    assert 0 < written.max_logit_difference < written.tolerance < 1e-4
    assert 0 < written.max_attention_difference < 1e-4
    assert verify_bundle(classifier_bundle, classifier_checkpoint, ["A dog."]).different_generations == 0


@pytest.mark.parametrize("output", ["hidden", "label_logprobs", "encoder_attention.1"])
def test_a_difference_to_pytorch_is_found(
    classifier_bundle: Path,
    classifier_checkpoint: Path,
    toy_sentences: list[str],
    output: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = load_model(classifier_checkpoint)
    assert isinstance(model, Classifier)

    class Wrong:
        def __init__(self, graph: Path) -> None:
            self._session = open_session(graph)

        def run(self, names: list[str], feed: dict[str, Array]) -> list[Array]:
            given = self._session.run(names, feed)
            return [value + 0.01 * (name == output) for name, value in zip(names, given, strict=True)]

    monkeypatch.setattr("sightline.export.check.verify.open_session", Wrong)
    with pytest.raises(VerificationError, match=r"differ by 0\.01"):
        verify_trained(classifier_bundle, model, tokenizer, toy_sentences)


def test_labels_do_not_depend_on_padding_or_the_batch(classifier_bundle: Path, toy_sentences: list[str]) -> None:
    tokenizer = read_tokenizer(classifier_bundle / TOKENIZER)
    sessions = open_sessions(classifier_bundle, read_manifest(classifier_bundle))
    sources = [encoding.ids for encoding in tokenizer.encode_batch(toy_sentences)]
    together = encode(sessions, sources)["label_logprobs"]
    alone = np.concatenate([encode(sessions, [source])["label_logprobs"] for source in sources])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(np.exp(together).sum(axis=1), 1, rtol=1e-6)


def test_other_forms_are_rejected(classifier_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is an encoder; float16 is only for encoder-decoder models"):
        half_bundle(classifier_bundle, tmp_path / "half", None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": []}, "exactly if its graph, outputs and labels are present"),
        ({"tasks": ["encode"]}, "exactly if its graph, outputs and labels are present"),
        ({"tasks": ["generate", "encode", "classify"]}, "exactly if its graph, outputs and labels are present"),
        ({"languages": {"sources": ["en"], "targets": ["de"]}}, "languages requires the task"),
    ],
    ids=["no labels", "no task", "a task too many", "languages"],
)
def test_a_manifest_with_contradictory_tasks_is_rejected(
    classifier_bundle: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    document = json.loads((classifier_bundle / MANIFEST).read_text(encoding="utf-8"))
    (tmp_path / MANIFEST).write_text(json.dumps({**document, **change}), encoding="utf-8")
    with pytest.raises(BundleError, match=reason):
        read_manifest(tmp_path)
