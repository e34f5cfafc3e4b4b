import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from sightline.export.import_errors import VerificationError
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model
from sightline.model.data.text import numbered_sentences
from tests.export.verified import verify_trained


def test_a_correct_bundle_passes_and_reports_its_measurements(
    bundle: Path, model: Transformer, tokenizer: Tokenizer, toy_sentences: list[str]
) -> None:
    verification = verify_trained(bundle, model, tokenizer, toy_sentences)
    assert verification.sentences == len(toy_sentences)
    assert 0 < verification.max_logit_difference < verification.tolerance < 1e-4
    assert 0 < verification.max_attention_difference < verification.tolerance
    assert verification.different_generations == 0


@pytest.mark.parametrize("name", ["encoder.1.feed_forward.inner.weight", "decoder.0.cross_attention.value.bias"])
def test_an_error_of_a_ten_thousandth_in_one_weight_is_found(
    bundle: Path, checkpoint: Path, toy_sentences: list[str], name: str
) -> None:
    model, tokenizer = load_model(checkpoint)
    assert isinstance(model, Transformer)
    with torch.no_grad():
        dict(model.named_parameters())[name].flatten()[5] += 1e-4
    with pytest.raises(VerificationError, match="differ by"):
        verify_trained(bundle, model, tokenizer, toy_sentences)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("encoder.0.self_attention.query.weight", "hidden differ"),
        ("decoder.1.self_attention.value.bias", "logits differ"),
        ("decoder.0.cross_attention.key.weight", "attention maps differ"),
        ("embedding.weight", "greedy generations differ"),
    ],
)
def test_a_changed_weight_is_found(
    bundle: Path, checkpoint: Path, toy_sentences: list[str], name: str, what: str
) -> None:
    model, tokenizer = load_model(checkpoint)
    assert isinstance(model, Transformer)
    with torch.no_grad():
        dict(model.named_parameters())[name][3] += 0.3
    with pytest.raises(VerificationError, match=what):
        verify_trained(bundle, model, tokenizer, toy_sentences[:2])


def test_nan_never_passes(bundle: Path, checkpoint: Path, toy_sentences: list[str]) -> None:
    model, tokenizer = load_model(checkpoint)
    assert isinstance(model, Transformer)
    with torch.no_grad():
        model.embedding.weight[2] = math.nan
    with pytest.raises(VerificationError, match="differ by nan"):
        verify_trained(bundle, model, tokenizer, toy_sentences[:1], tolerance=math.inf)


def test_blank_lines_are_no_sentences(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("One.\n\n  \nTwo, über.\n", encoding="utf-8")
    assert list(numbered_sentences(path).values()) == ["One.", "Two, über."]
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no sentences"):
        numbered_sentences(path)


def test_a_lone_carriage_return_ends_no_sentence(tmp_path: Path) -> None:
    (tmp_path / "sentences.txt").write_bytes(b"One\rand more.\r\nTwo.\n")
    assert list(numbered_sentences(tmp_path / "sentences.txt").values()) == ["One\rand more.", "Two."]
