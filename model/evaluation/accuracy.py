"""Accuracy and F1 of a classifier of texts."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.pretrained import PretrainedClassifier
from sightline.model.data.records import LabelledRecord, Record
from sightline.model.evaluation.length_groups import encode_truncated, outputs_of
from sightline.model.evaluation.result import Evaluation, Method, Share, only, shortened

NUM_SAMPLES = 5

Labels = Sequence[frozenset[str]]  # the labels of each text
ItemT = TypeVar("ItemT")


def scores_of(model: Classifier | PretrainedClassifier, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return the scores (N, C) of the labels of texts: log-probabilities, or with `multi_label`
    logits. Texts that are too long are truncated.
    """
    return torch.stack(outputs_of(model, encode_truncated(tokenizer, texts, model.config.max_positions)))


def chosen_labels(scores: Tensor, labels: Sequence[str], multi_label: bool) -> list[frozenset[str]]:
    """Return the predicted labels of each text: the most likely one, or with `multi_label` all with
    a probability above one half.
    """
    is_chosen = scores > 0 if multi_label else functional.one_hot(scores.argmax(dim=-1), len(labels))
    return [frozenset(labels[index] for index in row.nonzero().flatten().tolist()) for row in is_chosen]


@dataclass(frozen=True)
class Counts:
    """Numbers of texts, or of entities, of a label: predicted rightly, wrongly, and missed."""

    true_positives: int = 0
    false_positives: int = 0
    false_negatives: int = 0

    @property
    def support(self) -> int:
        """Number of texts that have the label."""
        return self.true_positives + self.false_negatives

    @property
    def precision(self) -> float:
        """Share of right predictions; 0 if the label is never predicted."""
        return self.true_positives / max(1, self.true_positives + self.false_positives)

    @property
    def recall(self) -> float:
        """Share of texts that are found; 0 if no text has the label."""
        return self.true_positives / max(1, self.support)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if both are 0."""
        return 2 * self.true_positives / max(1, 2 * self.true_positives + self.false_positives + self.false_negatives)


def count_labels(
    predicted: Sequence[frozenset[ItemT]], expected: Sequence[frozenset[ItemT]], label_of: Callable[[ItemT], str]
) -> dict[str, Counts]:
    """Return the numbers of each label that occurs. A text has labels, or entities with a label."""
    right, wrong, missed = Counter[str](), Counter[str](), Counter[str]()
    for guess, true in zip(predicted, expected, strict=True):
        right.update(map(label_of, guess & true))
        wrong.update(map(label_of, guess - true))
        missed.update(map(label_of, true - guess))
    return {label: Counts(right[label], wrong[label], missed[label]) for label in sorted({*right, *wrong, *missed})}


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sums of the numbers of all labels."""
    rows = [(one.true_positives, one.false_positives, one.false_negatives) for one in counts]
    return Counts(*map(sum, zip(*rows, strict=True)))


def f1_metrics(counts: Mapping[str, Counts]) -> dict[str, float]:
    """Return F1 in percent, of all labels together and as the mean of those that occur."""
    macro = sum(one.f1 for one in counts.values()) / max(1, len(counts))
    return {"micro F1": 100 * total(counts.values()).f1, "macro F1": 100 * macro}


def label_metrics(predicted: Labels, expected: Labels, multi_label: bool) -> tuple[dict[str, float], dict[str, Method]]:
    """Return the metrics of a classifier in percent, with the interval of the share of texts whose
    labels are all predicted, and no others.
    """
    exact = Share(sum(guess == true for guess, true in zip(predicted, expected, strict=True)), len(expected))
    metrics = f1_metrics(count_labels(predicted, expected, str))
    if multi_label:
        metrics["exact match"] = 100 * exact.value
    else:
        metrics = {"accuracy": 100 * exact.value, "macro F1": metrics["macro F1"]}
    methods = dict.fromkeys(metrics, Method(exact.total))
    methods["exact match" if multi_label else "accuracy"] = Method(exact.total, interval=exact.percent_interval)
    return metrics, methods


def label_fields(counts: Mapping[str, Counts], unit: str) -> dict[str, Any]:
    """Return precision, recall and F1 in percent, and the number of texts, of each label."""
    return {
        label: {
            **{name: round(100 * float(getattr(one, name)), 2) for name in ("precision", "recall", "f1")},
            unit: one.support,
        }
        for label, one in counts.items()
    }


def confusion_matrix(predicted: Labels, expected: Labels, labels: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return how often each label (first) was predicted as each (second), given one for a text."""
    pairs = Counter((*true, *guess) for guess, true in zip(predicted, expected, strict=True))
    return {true: {guess: pairs[true, guess] for guess in labels} for true in labels}


def confusion_lines(texts: Sequence[str], predicted: Labels, expected: Labels, labels: Sequence[str]) -> list[str]:
    """Describe the most frequent confusions, each with the first text."""
    found = dict[tuple[frozenset[str], frozenset[str]], list[str]]()  # texts by expected and predicted labels
    for text, guess, true in zip(texts, predicted, expected, strict=True):
        if guess != true:
            found.setdefault((true, guess), []).append(text)

    def named(some: frozenset[str]) -> str:
        return ", ".join(label for label in labels if label in some) or "no label"

    return [
        f"expected {named(true)}, predicted {named(guess)}: {len(confused)} of {len(texts)}, such as: "
        f"{shortened(confused[0])}"
        for (true, guess), confused in sorted(found.items(), key=lambda item: -len(item[1]))[:NUM_SAMPLES]
    ]


def expected_labels(records: Sequence[LabelledRecord], labels: Sequence[str]) -> list[frozenset[str]]:
    """Return the labels of records. Raises `ValueError` if the model lacks one."""
    for number, record in enumerate(records, start=1):
        for label in record.labels:
            if label not in labels:
                raise ValueError(
                    f"record {number} has the label {label!r}, but the labels of the model are {', '.join(labels)}"
                )
    return [frozenset(record.labels) for record in records]


def evaluate_classification(
    model: Classifier | PretrainedClassifier, tokenizer: Tokenizer, records: Sequence[Record]
) -> Evaluation:
    """Return the metrics of a classifier, its most frequent confusions, and each text with the
    probability that the model gives to exactly the expected labels.
    """
    kept, labels, multi_label = only(records, LabelledRecord), model.config.labels, model.config.multi_label
    texts, expected = [record.text for record in kept], expected_labels(kept, labels)
    scores = scores_of(model, tokenizer, texts)
    predicted = chosen_labels(scores, labels, multi_label)
    is_expected = torch.tensor([[label in true for label in labels] for true in expected])  # (N, C)
    if multi_label:
        log_probabilities = functional.logsigmoid(torch.where(is_expected, scores, -scores)).sum(dim=1)
    else:
        log_probabilities = scores[is_expected]

    def named(some: frozenset[str]) -> Any:
        names = [label for label in labels if label in some]
        return names if multi_label else names[0]

    predictions = [
        {"text": text, "expected": named(true), "predicted": named(guess), "probability": round(probability, 6)}
        for text, true, guess, probability in zip(
            texts, expected, predicted, log_probabilities.exp().tolist(), strict=True
        )
    ]
    counts = count_labels(predicted, expected, str)
    details = {
        "labels": label_fields({label: counts.get(label, Counts()) for label in labels}, "texts"),
        "confusion": {} if multi_label else confusion_matrix(predicted, expected, labels),
    }
    metrics, methods = label_metrics(predicted, expected, multi_label)
    samples = tuple(confusion_lines(texts, predicted, expected, labels))
    return Evaluation(metrics, samples, methods, predictions, details)
