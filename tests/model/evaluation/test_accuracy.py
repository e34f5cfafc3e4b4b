import dataclasses
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from sightline.model.architectures.classifier import Classifier
from sightline.model.checkpoint import load_model
from sightline.model.data.records import LabelledRecord
from sightline.model.data.tokenizer_training import encode_lines
from sightline.model.evaluation.accuracy import (
    confusion_lines,
    count_labels,
    evaluate_classification,
    exact_matches,
    expected_labels,
    label_fields,
    label_metrics,
    macro_f1,
    micro_f1,
    predict,
)
from sightline.model.evaluation.length_groups import encode_truncated

LABELS = ("bad", "fair", "good")
# Texts of the labels 0, 0, 0, 1, 1, 2, of which the last is never predicted.
EXPECTED = [frozenset([label]) for label in (0, 0, 0, 1, 1, 2)]
PREDICTED = [frozenset([label]) for label in (0, 0, 1, 1, 1, 0)]


@pytest.fixture(scope="module")
def loaded(classifier_checkpoint: Path) -> tuple[Classifier, Tokenizer]:
    model, tokenizer = load_model(classifier_checkpoint)
    assert isinstance(model, Classifier)
    return model, tokenizer


def scores(loaded: tuple[Classifier, Tokenizer], text: str) -> list[float]:
    """Return the scores of the labels of one text."""
    model, tokenizer = loaded
    ids = tokenizer.encode(text).ids
    found: list[float] = model(torch.tensor([ids]), torch.tensor([len(ids)]))[0].tolist()
    return found


def test_accuracy_counts_what_the_model_chooses(loaded: tuple[Classifier, Tokenizer], toy_sentences: list[str]) -> None:
    chosen = []
    for text in toy_sentences:
        row = scores(loaded, text)
        chosen.append(row.index(max(row)))
    predicted, expected = predict(*loaded, toy_sentences), [frozenset([label]) for label in chosen]
    wrong = [frozenset([(label + 1) % 3]) for label in chosen[:2]]
    assert exact_matches(predicted, expected).count == len(toy_sentences)
    assert exact_matches(predicted, wrong + expected[2:]).count == len(toy_sentences) - 2


def test_with_several_labels_those_above_one_half_are_predicted(
    loaded: tuple[Classifier, Tokenizer], toy_sentences: list[str]
) -> None:
    model, tokenizer = loaded
    several = Classifier(dataclasses.replace(model.config, multi_label=True))
    several.load_state_dict(model.state_dict())
    several.eval()
    predicted = predict(several, tokenizer, toy_sentences)
    for text, labels in zip(toy_sentences, predicted, strict=True):
        chances = [torch.tensor(score).sigmoid() for score in scores((several, tokenizer), text)]
        assert labels == {index for index, chance in enumerate(chances) if chance > 0.5}
    assert len(set(predicted)) > 1


def test_a_text_that_is_too_long_is_truncated(loaded: tuple[Classifier, Tokenizer]) -> None:
    ids = encode_lines(loaded[1], ["word " * 300])[0]
    assert encode_truncated(loaded[1], ["word " * 300], 256) == [[*ids[:255], ids[-1]]]
    assert predict(*loaded, ["word " * 300]) == predict(*loaded, ["word " * 400])


def test_the_scores_of_each_label_are_those_by_hand() -> None:
    bad, fair, good = count_labels(PREDICTED, EXPECTED, 3)
    assert (bad.precision, bad.recall) == (2 / 3, 2 / 3)
    assert (fair.precision, fair.recall) == (2 / 3, 1)
    assert (good.precision, good.recall, good.f1) == (0, 0, 0)
    assert (bad.f1, fair.f1) == pytest.approx((2 / 3, 4 / 5))
    assert [one.support for one in (bad, fair, good)] == [3, 2, 1]
    assert label_fields([bad, fair, good], LABELS)["fair"] == {
        "precision": 66.67,
        "recall": 100.0,
        "f1": 80.0,
        "texts": 2,
    }


def test_the_metrics_of_one_label_for_a_text_are_those_by_hand() -> None:
    metrics = label_metrics(PREDICTED, EXPECTED, 3, multi_label=False)
    assert list(metrics) == ["accuracy", "macro F1"]
    assert metrics["accuracy"] == pytest.approx(100 * 4 / 6)
    assert metrics["macro F1"] == pytest.approx(100 * (2 / 3 + 4 / 5 + 0) / 3)


def test_the_metrics_of_several_labels_are_those_by_hand() -> None:
    expected = [frozenset({0, 1}), frozenset({1}), frozenset[int](), frozenset({2})]
    predicted = [frozenset({0}), frozenset({1}), frozenset({1}), frozenset({2})]
    metrics = label_metrics(predicted, expected, 3, multi_label=True)
    assert list(metrics) == ["micro F1", "macro F1", "exact match"]
    # Three right predictions, one wrong one and one that is missing.
    assert metrics["micro F1"] == pytest.approx(100 * 6 / 8)
    assert metrics["macro F1"] == pytest.approx(100 * (1 + 0.5 + 1) / 3)
    assert metrics["exact match"] == 50


def test_labels_that_do_not_occur_are_not_part_of_the_mean() -> None:
    counts = count_labels(PREDICTED, EXPECTED, 3)
    assert macro_f1([*counts, *count_labels([], [], 5)]) == macro_f1(counts)
    assert (macro_f1([]), micro_f1([])) == (0, 0)


def test_the_most_frequent_confusions_are_described_with_a_text() -> None:
    texts = [f"text {number}" for number in range(8)]
    expected = [*EXPECTED, frozenset([2]), frozenset[int]()]
    predicted = [*PREDICTED, frozenset([0]), frozenset([0, 1])]
    assert confusion_lines(texts, predicted, expected, LABELS) == [
        "expected good, predicted bad: 2 of 8, such as: text 5",
        "expected bad, predicted fair: 1 of 8, such as: text 2",
        "expected no label, predicted bad, fair: 1 of 8, such as: text 7",
    ]


def test_a_label_that_the_model_lacks_is_rejected() -> None:
    records = [LabelledRecord("x", ("bad",)), LabelledRecord("x", ("best",))]
    with pytest.raises(ValueError, match="record 2 has the label 'best', but the labels of the model are bad, fair"):
        expected_labels(records, LABELS)


def test_the_metric_during_training_truncates_texts_that_are_too_long(
    loaded: tuple[Classifier, Tokenizer], toy_sentences: list[str]
) -> None:
    model, tokenizer = loaded
    texts = [*toy_sentences, "word " * 300]
    records = [
        LabelledRecord(text, tuple(LABELS[index] for index in label))
        for text, label in zip(texts, predict(model, tokenizer, texts), strict=True)
    ]
    found = evaluate_classification(model, tokenizer, records)
    assert found.metrics == {"accuracy": 100.0, "macro F1": 100.0}
    assert found.samples == ()
    assert evaluate_classification(model, tokenizer, []).metrics == {}
