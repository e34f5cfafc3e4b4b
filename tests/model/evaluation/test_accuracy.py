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
    chosen_labels,
    confusion_lines,
    confusion_matrix,
    count_labels,
    evaluate_classification,
    expected_labels,
    f1_metrics,
    label_fields,
    label_metrics,
    scores_of,
)
from sightline.model.evaluation.length_groups import encode_truncated

LABELS = ("bad", "fair", "good")
# The last label is never predicted.
EXPECTED = [frozenset([label]) for label in ("bad", "bad", "bad", "fair", "fair", "good")]
PREDICTED = [frozenset([label]) for label in ("bad", "bad", "fair", "fair", "fair", "bad")]


@pytest.fixture(scope="module")
def loaded(classifier_checkpoint: Path) -> tuple[Classifier, Tokenizer]:
    model, tokenizer = load_model(classifier_checkpoint)
    assert isinstance(model, Classifier)
    return model, tokenizer


def predict(model: Classifier, tokenizer: Tokenizer, texts: list[str]) -> list[frozenset[str]]:
    return chosen_labels(scores_of(model, tokenizer, texts), LABELS, model.config.multi_label)


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
    predicted, expected = predict(*loaded, toy_sentences), [frozenset([LABELS[label]]) for label in chosen]
    assert predicted == expected
    wrong = [frozenset([LABELS[(label + 1) % 3]]) for label in chosen[:2]]
    metrics, methods = label_metrics(predicted, wrong + expected[2:], multi_label=False)
    assert metrics["accuracy"] == pytest.approx(100 * (1 - 2 / len(toy_sentences)))
    low, high = methods["accuracy"].interval or (0, 0)
    assert low < metrics["accuracy"] < high


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
        assert labels == {LABELS[index] for index, chance in enumerate(chances) if chance > 0.5}
    assert len(set(predicted)) > 1


def test_a_text_that_is_too_long_is_truncated(loaded: tuple[Classifier, Tokenizer]) -> None:
    ids = encode_lines(loaded[1], ["word " * 300])[0]
    assert encode_truncated(loaded[1], ["word " * 300], 256) == [[*ids[:255], ids[-1]]]
    assert predict(*loaded, ["word " * 300]) == predict(*loaded, ["word " * 400])


def test_the_scores_of_each_label_are_those_by_hand() -> None:
    counts = count_labels(PREDICTED, EXPECTED, str)
    bad, fair, good = (counts[label] for label in LABELS)
    assert (bad.precision, bad.recall) == (2 / 3, 2 / 3)
    assert (fair.precision, fair.recall) == (2 / 3, 1)
    assert (good.precision, good.recall, good.f1) == (0, 0, 0)
    assert (bad.f1, fair.f1) == pytest.approx((2 / 3, 4 / 5))
    assert [one.support for one in (bad, fair, good)] == [3, 2, 1]
    assert label_fields(counts, "texts")["fair"] == {
        "precision": 66.67,
        "recall": 100.0,
        "f1": 80.0,
        "texts": 2,
    }


def test_the_metrics_of_one_label_for_a_text_are_those_by_hand() -> None:
    metrics, _ = label_metrics(PREDICTED, EXPECTED, multi_label=False)
    assert list(metrics) == ["accuracy", "macro F1"]
    assert metrics["accuracy"] == pytest.approx(100 * 4 / 6)
    assert metrics["macro F1"] == pytest.approx(100 * (2 / 3 + 4 / 5 + 0) / 3)


def test_the_metrics_of_several_labels_are_those_by_hand() -> None:
    expected = [frozenset({"bad", "fair"}), frozenset({"fair"}), frozenset[str](), frozenset({"good"})]
    predicted = [frozenset({label}) for label in ("bad", "fair", "fair", "good")]
    metrics, _ = label_metrics(predicted, expected, multi_label=True)
    assert list(metrics) == ["micro F1", "macro F1", "exact match"]
    # Three right predictions, one wrong one and one that is missing.
    assert metrics["micro F1"] == pytest.approx(100 * 6 / 8)
    assert metrics["macro F1"] == pytest.approx(100 * (1 + 0.5 + 1) / 3)
    assert metrics["exact match"] == 50


def test_the_confusion_matrix_counts_all_labels() -> None:
    assert confusion_matrix(PREDICTED, EXPECTED, (*LABELS, "best")) == {
        "bad": {"bad": 2, "fair": 1, "good": 0, "best": 0},
        "fair": {"bad": 0, "fair": 2, "good": 0, "best": 0},
        "good": {"bad": 1, "fair": 0, "good": 0, "best": 0},
        "best": {"bad": 0, "fair": 0, "good": 0, "best": 0},
    }


def test_without_labels_the_scores_are_0() -> None:
    assert f1_metrics(count_labels([], [], str)) == {"micro F1": 0, "macro F1": 0}


def test_the_most_frequent_confusions_are_described_with_a_text() -> None:
    texts = [f"text {number}" for number in range(8)]
    expected = [*EXPECTED, frozenset(["good"]), frozenset[str]()]
    predicted = [*PREDICTED, frozenset(["bad"]), frozenset(["bad", "fair"])]
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
        LabelledRecord(text, tuple(label)) for text, label in zip(texts, predict(model, tokenizer, texts), strict=True)
    ]
    found = evaluate_classification(model, tokenizer, records)
    assert found.metrics == {"accuracy": 100.0, "macro F1": 100.0}
    assert found.samples == ()
