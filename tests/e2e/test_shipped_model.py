"""Requirements on the shipped model of a fresh clone, over HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench.server import RunningServer
from sightline.base.bundle import Quality
from sightline.base.bundle_files import read_bundle
from tests.e2e.asking import post

SENTENCE = "Two girls are playing with a small brown dog on the beach."


@pytest.fixture(scope="module")
def attention(shipped: RunningServer) -> Any:
    body = {"inputs": SENTENCE, "kinds": ["cross"], "reduce": "mean"}
    (output,) = post(shipped, "/v1/attention", body)["outputs"]
    return output


def test_a_sentence_becomes_ordinary_german(shipped: RunningServer) -> None:
    text = post(shipped, "/v1/generate", {"inputs": SENTENCE})["outputs"][0]["text"]
    for word in ("Mädchen", "Hund", "Strand"):
        assert word in text
    assert text == text.strip() and text.endswith(".") and " ." not in text and "  " not in text
    assert text[0].isupper()


def test_hund_attends_to_dog_in_at_least_one_layer(attention: Any) -> None:
    sources = [token.strip() for token in attention["source_tokens"]]
    row = [token.strip() for token in attention["target_tokens"]].index("Hund")
    cross = attention["maps"][0]
    layers, heads, rows, columns = cross["shape"]
    assert (heads, rows, columns) == (1, len(attention["target_tokens"]), len(sources))
    peaks = set()
    for layer in range(layers):
        start = (layer * rows + row) * columns
        weights = cross["data"][start : start + columns]
        assert sum(weights) == pytest.approx(1, abs=1e-4)
        peaks.add(sources[max(range(columns), key=weights.__getitem__)])
    assert peaks & {"dog", "brown"}


def test_attention_explains_the_text_that_generate_gives(shipped: RunningServer, attention: Any) -> None:
    assert attention["text"] == post(shipped, "/v1/generate", {"inputs": SENTENCE})["outputs"][0]["text"]


def test_the_card_reports_the_evaluation() -> None:
    folder = Path("bundles/multi30k-en-de")
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    for name in ("tokenised_bleu", "bleu", "chrf"):
        signature = scores[name]["signature"].replace("|", r"\|")  # a bar would end the cell
        assert f"| {scores[name]['value']:.2f} | `{signature}` |" in card
    assert f"epochs {scores['checkpoint']['epochs'][0]} to {scores['checkpoint']['epochs'][-1]}" in card
    assert scores["sentences"] == 1000 and scores["num_beams"] == 5


def test_the_card_reports_the_loss_by_quantisation() -> None:
    folder = Path("bundles/multi30k-en-de")
    manifest, card = read_bundle(folder), (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert manifest.quantization is not None
    quality = manifest.quantization.quality
    assert isinstance(quality, Quality)
    assert f"{quality.split}, {quality.sentences:,} sentences" in card
    for label, bleu in zip(("greedy", "beam 5"), quality.bleu, strict=True):
        assert f"| {label} | {bleu.float32:.2f} | {bleu.quantized:.2f} |" in card
        assert bleu.float32 - bleu.quantized <= 0.3


def test_the_card_names_data_licence_and_limits() -> None:
    card = Path("bundles/multi30k-en-de/MODEL_CARD.md").read_text(encoding="utf-8")
    for word in ("Multi30k", "non-commercial", "not good for"):
        assert word in card
