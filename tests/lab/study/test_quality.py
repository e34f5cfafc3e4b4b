import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from lab.study.quality import measure, read_reviews, tables
from lab.zoo.derived import derive
from lab.zoo.systems import MULTI30K, SST2, bundle_name
from sightline.model.architectures.classifier import Classifier
from sightline.model.checkpoint import load_checkpoint, load_model
from sightline.model.evaluation.accuracy import exact_matches, predict
from sightline.model.evaluation.bleu import moses_lines, read_test_set, score, translate

SPLIT = "test_2016_flickr"
LABELS = ("bad", "fair", "good")  # of the toy classifier


@pytest.fixture
def data(tmp_path: Path, checkpoint: Path, toy_sentences: list[str]) -> Path:
    """Write a test set whose references, except for one, are the toy model's own translations."""
    folder = tmp_path / "data"
    parallel, labelled = folder / MULTI30K.folder, folder / SST2.folder
    parallel.mkdir(parents=True)
    labelled.mkdir()
    references = [*translate(*load_checkpoint(checkpoint), toy_sentences[1:], 5, 1.0), "Zwei Kinder am Strand."]
    sides = {"en": [*toy_sentences[1:], toy_sentences[0]], "de": references}
    for ending, lines in {**sides, "lc.norm.tok.de": moses_lines(references, "de")}.items():
        (parallel / f"{SPLIT}.{ending}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rows = [f"{number % 3}\t{text}\n" for number, text in enumerate(toy_sentences)]
    (labelled / "dev.tsv").write_text("".join(rows), encoding="utf-8")
    (labelled / "test.tsv").write_text("".join(rows[1:]), encoding="utf-8")
    return folder


def test_served_bundles_score_the_same_as_pytorch_and_chat_models_are_skipped(
    data: Path,
    tmp_path: Path,
    bundle: Path,
    classifier_bundle: Path,
    chats: Path,
    checkpoint: Path,
    classifier_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lab.zoo.derived.LABELS", LABELS)
    for folder in (bundle, classifier_bundle, chats / "bundles" / bundle_name("chat-gatt")):
        shutil.copytree(folder, tmp_path / "bundles" / folder.name)
    result = measure(Namespace(bundles=tmp_path / "bundles", data=data))
    translating, classifying, tested = result.rows
    test_set = read_test_set(data / MULTI30K.folder, SPLIT, "en", "de")
    expected = score(translate(*load_checkpoint(checkpoint), test_set.sources, 5, 1.0), test_set, "de")
    assert expected.tokenised_bleu is not None and 50 < expected.tokenised_bleu.value < 100
    assert (translating["model"], translating["sentences"]) == ("toy", len(test_set.sources))
    assert translating["tok_lc"] == round(expected.tokenised_bleu.value, 2)
    assert translating["bleu"] == round(expected.bleu.value, 2)
    assert translating["chrf"] == round(expected.chrf.value, 2)
    model, tokenizer = load_model(classifier_checkpoint)
    assert isinstance(model, Classifier)
    derive("labelled", data / SST2.folder, tmp_path / "labelled")
    texts, labels = read_reviews(tmp_path / "labelled", "dev")
    right = exact_matches(predict(model, tokenizer, texts), [frozenset([LABELS.index(label)]) for label in labels])
    assert (classifying["model"], classifying["sentences"]) == ("toy-classifier", right.total)
    assert (classifying["correct"], classifying["split"]) == (right.count, "dev")
    assert (tested["sentences"], tested["split"]) == (right.total - 1, "test")
    parts = tables(result)
    assert f"| `toy` | float32 | {translating['tok_lc']:.2f} |" in parts["served"]
    assert f"| `toy-classifier` | float32 | dev | {right.count} of {right.total}: " in parts["sentiment"]


def test_a_test_set_without_tokenized_references_is_rejected(data: Path, bundle: Path) -> None:
    (data / MULTI30K.folder / f"{SPLIT}.lc.norm.tok.de").unlink()
    with pytest.raises(FileNotFoundError, match=f"has no tokenized {SPLIT}"):
        measure(Namespace(bundles=bundle.parent, data=data))
