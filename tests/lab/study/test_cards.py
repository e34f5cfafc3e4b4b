from pathlib import Path
from typing import Any

import pytest

from lab.bench.record import Recorded, Result, read_results
from lab.study.__main__ import RESULTS
from lab.study.cards import CARD, card, write_cards
from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.base.bundle import read_manifest
from sightline.export.options import BundleMetadata
from tests.support.training_runs import export_bundle

BUNDLES = Path("bundles")
SCORED: dict[str, Any] = {
    "kind": "system",
    "system": "bahdanau",
    "num_beams": 5,
    "epochs": 24,
    "updates": 6312,
    "tokenised_bleu": {"value": 37.123},
    "bleu": {"value": 36.5},
    "chrf": {"value": 61.75},
}


def recorded(*rows: dict[str, Any]) -> Recorded:
    return Recorded({}, "", Result(rows=rows))


def test_every_system_of_a_folder_gets_a_card_with_the_scores_of_its_first_seed_and_bundle(
    checkpoint: Path, tmp_path: Path, toy_sentences: list[str]
) -> None:
    name = bundle_name("bahdanau")
    export_bundle(checkpoint, tmp_path / name, BundleMetadata(name, "additive"), toy_sentences[:1], half_weights=True)
    export_bundle(checkpoint, tmp_path / "other", BundleMetadata("other"), toy_sentences[:1])
    served = {"model": name, "split": "test", "num_beams": 5, "tok_lc": 37.1, "bleu": 36.4, "chrf": 61.7}
    results = {
        "collect": recorded(
            {**SCORED, "seed": 1, "precision": "bfloat16"},
            {**SCORED, "seed": 2, "epochs": 9, "precision": "float32"},
            {"kind": "test set"},
        ),
        "quality": recorded(served, {**served, "model": "other"}),
    }
    write_cards(results, tmp_path)
    text = " ".join((tmp_path / name / CARD).read_text(encoding="utf-8").split())  # lines are wrapped
    assert "37.12 BLEU" in text and "24 epochs, 6,312 updates, seed 1" in text and "9 epochs" not in text
    assert "`python -m lab.zoo train DATA --systems bahdanau --precision bfloat16`" in text
    assert text.count("As served") == 1 and "37.10 BLEU" in text
    assert "| weights | float16, computed in float32 |" in text
    assert "| trained on | single sentences |" in text
    assert "non-commercial" in text
    assert not (tmp_path / "other" / CARD).exists()


@pytest.mark.parametrize("name", [name for name in SYSTEMS if (BUNDLES / bundle_name(name)).is_dir()])
def test_the_repositorys_cards_are_up_to_date(name: str) -> None:
    folder = BUNDLES / bundle_name(name)
    assert (folder / CARD).read_text(encoding="utf-8") == card(name, read_manifest(folder), read_results(RESULTS))


def test_a_card_without_results_has_no_figures(bundle: Path) -> None:
    for name in SYSTEMS:
        text = card(name, read_manifest(bundle), {})
        assert "## Figures" not in text
        assert "## Licence" in text
        assert "The encoder was not trained for sentence similarity." in text
        assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("|"))


def test_cards_of_classifiers_and_chat_models_have_their_own_figures(bundle: Path) -> None:
    manifest = read_manifest(bundle).model_copy(update={"name": bundle_name("sentiment")})
    right = {"correct": 7, "sentences": 8, "split": "dev", "accuracy": 87.5, "interval_95": [52.9, 97.8]}
    text = card("sentiment", manifest, {"quality": recorded({"model": manifest.name, **right})})
    assert "7 of 8 correct on dev, 87.50 % (95 %: 52.9 to 97.8)" in text
    kept = {"system": "chat-gatt", "turn": 4, "kept": 3, "total": 9}
    rows = ({**kept, "condition": "unseen values"}, {**kept, "condition": "trained"}, {**kept, "run_seed": 1})
    text = card("chat-gatt", read_manifest(bundle), {"recall": recorded(*rows)})
    assert text.count("- Instruction with an unseen value kept at turn 4: 3 of 9") == text.count("3 of 9") == 1
