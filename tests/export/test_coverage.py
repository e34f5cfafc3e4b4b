"""Choice of the head that shows omitted words: insertions, score, threshold and record."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import BundleError, Coverage, Manifest
from sightline.base.bundle_files import read_bundle, read_manifest, write_manifest
from sightline.base.text.words import coverage_of, word_spans
from sightline.export.check.alignment import SENTENCES, Translator
from sightline.export.check.coverage import INSERTIONS, Material, Words, auroc, best_head, choose_coverage, plant
from sightline.export.check.sessions import open_sessions
from tests.support.export import main

SHIPPED = Path("bundles/multi30k-en-de")


def words(texts: str, inserted: list[float], changed: list[float], own: list[float]) -> Words:
    """Return words with weights of one head: inserted ones, those beside them, unchanged ones."""
    weights = np.array([*inserted, *changed, *own], np.float32)[:, None, None]
    are_inserted = np.arange(len(weights)) < len(inserted)
    are_changed = np.arange(len(weights)) < len(inserted) + len(changed)
    return Words(texts.split(), weights, are_inserted, are_changed)


def test_the_coverage_of_a_word_is_the_largest_weight_of_all_steps() -> None:
    maps = np.array([[[0.1, 0.2, 0.7], [0.5, 0.4, 0.1]]], np.float32)  # one head, two steps, three tokens
    np.testing.assert_allclose(coverage_of(maps, [(0, 1), (2,)]), [[0.9, 0.7]], atol=1e-6)
    assert coverage_of(maps, []).shape == (1, 0)
    assert coverage_of(maps[:, :0], [(0,)]).tolist() == [[0]]


@pytest.mark.parametrize(
    ("omitted", "others", "expected"),
    [([0.1, 0.2], [0.3, 0.4], 1.0), ([0.4], [0.1, 0.2], 0.0), ([0.2], [0.1, 0.2, 0.3, 0.4], 0.625), ([], [0.1], 0.5)],
)
def test_the_auroc_counts_pairs_in_order(omitted: list[float], others: list[float], expected: float) -> None:
    values = np.array([*omitted, *others], np.float32)
    assert auroc(values, np.arange(len(values)) < len(omitted)) == pytest.approx(expected)


def test_the_head_with_the_best_order_is_chosen() -> None:
    bad = words("a b c d", [0.5, 0.1], [0.4], [0.4])
    both = np.concatenate([bad.weights, words("a b c d", [0.1, 0.1], [0.4], [0.4]).weights], axis=2)
    found = best_head(Words(bad.texts, both, bad.are_inserted, bad.are_changed))
    assert (found.layer, found.head, found.auroc, found.insertions) == (0, 1, 1.0, 2)


def test_a_head_that_is_hardly_better_than_chance_has_no_threshold() -> None:
    found = best_head(words("a b c d e f", [0.1, 0.5], [0.2, 0.6], [0.2, 0.6]))
    assert found.auroc == 0.75 and found.threshold is None and found.untranslated == ()


def test_the_threshold_marks_many_inserted_and_few_unchanged_words() -> None:
    inserted = [0.01 * number for number in range(1, 21)]  # up to 0.2
    others, own = [0.9] * 30, [0.155, *[0.9] * 29]
    found = best_head(words("w " * (20 + 30 + 30), inserted, others, own))
    assert found.threshold == 0.15 and found.recall == 0.7 and found.marked == 0.0 and found.precision == 1.0


def test_words_that_often_look_omitted_are_not_marked() -> None:
    inserted, others = [0.1] * 4, [0.9] * 4
    own = [0.05, 0.05, 0.9, 0.05, 0.9, 0.9]
    found = best_head(words("x x x x y y y y of of of dog dog cat", inserted, others, own))
    assert found.untranslated == ("of",)


def test_insertions_are_words_of_other_sentences_between_two_words() -> None:
    for language in ("en", "de", "zh"):
        material = Material(SENTENCES[language])
        for sentence in SENTENCES[language]:
            own = {sentence[slice(*span)].lower() for span in word_spans(sentence)}
            found = list(material.insert_into(sentence, np.random.default_rng(0)))
            assert 0 < len(found) <= INSERTIONS
            for text, (start, end) in found:
                gap = " " if " " in sentence else ""
                assert text[:start] + text[end + len(gap) :] == sentence
                inserted = [text[start:end][slice(*span)].lower() for span in word_spans(text[start:end])]
                assert own.isdisjoint(inserted) and 0 < start < end < len(text)
    assert not list(Material(["One."]).insert_into("One.", np.random.default_rng(0)))


def test_the_translation_of_the_sentence_is_forced_on_its_insertions(bundle: Path) -> None:
    translator = Translator(open_sessions(bundle, read_manifest(bundle)), bundle)
    found = plant(translator, ["A man in a hat sleeps.", "Several people wait near an old bus."])
    assert found.weights.shape == (len(found.texts), 2, 4)
    assert (found.weights >= 0).all() and found.are_inserted.any()
    assert not (found.are_inserted & ~found.are_changed).any()
    unchanged = [text for text, changed in zip(found.texts, found.are_changed, strict=True) if not changed]
    assert " ".join(unchanged) == "a man in a hat sleeps several people wait near an old bus"


def test_the_shipped_model_has_the_coverage_that_the_command_finds(sentences: list[str]) -> None:
    manifest = read_manifest(SHIPPED)
    recorded = manifest.coverage
    assert recorded is not None and recorded.threshold is not None and recorded.auroc > 0.9
    found = choose_coverage(open_sessions(SHIPPED, manifest), SHIPPED, sentences[:20])
    assert found is not None and (found.layer, found.head) == (recorded.layer, recorded.head)


def test_the_manifest_of_every_shipped_bundle_with_cross_attention_has_a_coverage() -> None:
    for path in Path("bundles").glob("*/manifest.json"):
        manifest = read_manifest(path.parent)
        assert (manifest.coverage is None) == (manifest.cross_attention is None), path


def test_an_export_records_the_coverage(bundle: Path) -> None:
    recorded = read_manifest(bundle).coverage
    assert recorded is not None and recorded.insertions > 0


def test_the_command_changes_only_the_coverage_of_a_manifest(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_bundle(copied)
    text = (copied / "sentences.txt").resolve()
    text.write_text("A man sleeps near a tree.\nSeveral people wait in the rain.\n", encoding="utf-8")
    assert main(["coverage", str(copied), "--sentences", str(text)]) == 0
    after = read_bundle(copied)
    assert after.coverage == Coverage.model_validate_json(capsys.readouterr().out)
    assert after.model_copy(update={"coverage": None}) == before.model_copy(update={"coverage": None})
    assert after.digest == before.digest


def test_a_bundle_without_cross_attention_is_an_error(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tuple(one for one in read_manifest(copied).attention if one.kind != "cross")
    changes: dict[str, Any] = {"attention": kept, "alignment": None, "coverage": None}
    write_manifest(copied, read_manifest(copied).model_copy(update=changes))
    assert main(["coverage", str(copied)]) == 1
    assert capsys.readouterr().err == (
        f"error: {copied} cannot show omitted words: it has no cross-attention, or fewer than two sentences fit its "
        "limits\n"
    )


def test_a_coverage_that_does_not_fit_the_model_is_rejected(copied: Path) -> None:
    document = json.loads((copied / "manifest.json").read_text(encoding="utf-8"))
    document["coverage"] = {"layer": 0, "head": 4, "auroc": 0.9, "insertions": 1}
    (copied / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BundleError, match="coverage must name a layer below 2 and heads below 4, got layer 0 and"):
        read_manifest(copied)


def test_manifests_of_earlier_versions_have_no_coverage(copied: Path) -> None:
    document = json.loads((copied / "manifest.json").read_text(encoding="utf-8"))
    del document["coverage"]
    assert Manifest.model_validate_json(json.dumps(document)).coverage is None
