"""Accuracy and F1 of a classifier of texts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.pretrained import PretrainedClassifier
from sightline.model.data.records import LabelledRecord, Record
from sightline.model.evaluation.length_groups import device_of, encode_truncated, grouped, padded
from sightline.model.evaluation.result import Evaluation, Method, shortened
from sightline.model.evaluation.share import Share

NUM_SAMPLES = 5

Labels = Sequence[frozenset[int]]  # the indices of the labels of each text


@torch.inference_mode()
def scores_of(model: Classifier | PretrainedClassifier, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return the scores (N, C) of the labels of texts: log-probabilities, or with `multi_label`
    logits. Texts that are too long are truncated.
    """
    config, device = model.config, device_of(model)
    rows = encode_truncated(tokenizer, texts, config.max_positions)
    scores = torch.zeros(len(rows), len(config.labels))
    for group in grouped(list(map(len, rows))):
        scores[group] = model(*padded([rows[index] for index in group], config.pad_id, device)).cpu()
    return scores


def chosen_labels(scores: Tensor, multi_label: bool) -> list[frozenset[int]]:
    """Return the predicted labels of each text: the most likely one, or with `multi_label` all with
    a probability above one half.
    """
    if multi_label:
        return [frozenset(row.nonzero().flatten().tolist()) for row in scores > 0]
    return [frozenset([label]) for label in scores.argmax(dim=-1).tolist()]


def predict(
    model: Classifier | PretrainedClassifier, tokenizer: Tokenizer, texts: Sequence[str]
) -> list[frozenset[int]]:
    """Return `chosen_labels` of texts."""
    return chosen_labels(scores_of(model, tokenizer, texts), model.config.multi_label)


def prediction_rows(
    texts: Sequence[str], scores: Tensor, expected: Labels, labels: Sequence[str], multi_label: bool
) -> list[dict[str, Any]]:
    """Describe each text with its expected and predicted labels, and the probability that the model
    gives to exactly the expected ones.
    """

    def named(indices: frozenset[int]) -> Any:
        names = [labels[index] for index in sorted(indices)]
        return names if multi_label else names[0]

    rows = list[dict[str, Any]]()
    for text, true, guess, row in zip(texts, expected, chosen_labels(scores, multi_label), scores, strict=True):
        is_true = torch.tensor([index in true for index in range(len(labels))])
        log_probability = functional.logsigmoid(torch.where(is_true, row, -row)) if multi_label else row[is_true]
        probability = round(log_probability.sum().exp().item(), 6)
        rows.append({"text": text, "expected": named(true), "predicted": named(guess), "probability": probability})
    return rows


def exact_matches(predicted: Labels, expected: Labels) -> Share:
    """Return the share of texts whose labels are all predicted, and no others."""
    return Share(sum(guess == true for guess, true in zip(predicted, expected, strict=True)), len(expected))


def accuracy_fields(share: Share) -> dict[str, Any]:
    """Return an accuracy and its 95 % confidence interval, in percent, as fields of a report."""
    return {
        "sentences": share.total,
        "correct": share.count,
        "accuracy": round(100 * share.value, 2),
        "interval_95": [round(100 * end, 2) for end in share.interval],
    }


@dataclass(frozen=True)
class Counts:
    """Numbers of texts, or of entities, of a label: predicted rightly, wrongly, and missed."""

    true_positives: int
    false_positives: int
    false_negatives: int

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


def count_labels(predicted: Labels, expected: Labels, num_labels: int) -> list[Counts]:
    right, wrong, missed = Counter[int](), Counter[int](), Counter[int]()
    for guess, true in zip(predicted, expected, strict=True):
        right.update(guess & true)
        wrong.update(guess - true)
        missed.update(true - guess)
    return [Counts(right[label], wrong[label], missed[label]) for label in range(num_labels)]


def macro_f1(counts: Sequence[Counts]) -> float:
    """Return the mean F1 of the labels that occur in predictions or texts, or 0 if none does."""
    scores = [label_counts.f1 for label_counts in counts if label_counts.support + label_counts.false_positives]
    return sum(scores) / max(1, len(scores))


def micro_f1(counts: Sequence[Counts]) -> float:
    return total(counts).f1


def total(counts: Sequence[Counts]) -> Counts:
    """Return the sums of the numbers of all labels."""
    totals = (sum(getattr(label_counts, name) for label_counts in counts) for name in Counts.__dataclass_fields__)
    return Counts(*totals)


def label_metrics(predicted: Labels, expected: Labels, num_labels: int, multi_label: bool) -> dict[str, float]:
    """Return the metrics of a classifier in percent."""
    counts, exact = count_labels(predicted, expected, num_labels), 100 * exact_matches(predicted, expected).value
    macro = {"macro F1": 100 * macro_f1(counts)}
    if multi_label:
        return {"micro F1": 100 * micro_f1(counts), **macro, "exact match": exact}
    return {"accuracy": exact, **macro}


def label_fields(counts: Sequence[Counts], labels: Sequence[str], unit: str = "texts") -> dict[str, Any]:
    """Return precision, recall and F1 in percent, and the number of texts, of each label."""
    return {
        label: {
            **{name: round(100 * float(getattr(label_counts, name)), 2) for name in ("precision", "recall", "f1")},
            unit: label_counts.support,
        }
        for label, label_counts in zip(labels, counts, strict=True)
    }


def confusions(predicted: Labels, expected: Labels) -> Counter[tuple[frozenset[int], frozenset[int]]]:
    """Return how often labels (first) were predicted as others (second)."""
    return Counter((true, guess) for guess, true in zip(predicted, expected, strict=True) if guess != true)


def confusion_matrix(predicted: Labels, expected: Labels, labels: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return how often each label (first) was predicted as each (second), given one for a text."""
    pairs = Counter((min(true), min(guess)) for guess, true in zip(predicted, expected, strict=True))
    return {true: {guess: pairs[row, column] for column, guess in enumerate(labels)} for row, true in enumerate(labels)}


def confusion_lines(texts: Sequence[str], predicted: Labels, expected: Labels, labels: Sequence[str]) -> list[str]:
    """Describe the most frequent confusions, each with the first text."""
    examples: Mapping[Any, str] = {
        (true, guess): text for text, guess, true in reversed(list(zip(texts, predicted, expected, strict=True)))
    }

    def named(indices: frozenset[int]) -> str:
        return ", ".join(labels[index] for index in sorted(indices)) or "no label"

    return [
        f"expected {named(true)}, predicted {named(guess)}: {count} of {len(texts)}, such as: "
        f"{shortened(examples[true, guess])}"
        for (true, guess), count in confusions(predicted, expected).most_common(NUM_SAMPLES)
    ]


def expected_labels(records: Sequence[LabelledRecord], labels: Sequence[str]) -> list[frozenset[int]]:
    """Return the labels of records as indices. Raises `ValueError` if the model lacks one."""
    index_of = {label: index for index, label in enumerate(labels)}
    for number, record in enumerate(records, start=1):
        for label in record.labels:
            if label not in index_of:
                raise ValueError(
                    f"record {number} has the label {label!r}, but the labels of the model are {', '.join(labels)}"
                )
    return [frozenset(index_of[label] for label in record.labels) for record in records]


def evaluate_classification(
    model: Classifier | PretrainedClassifier, tokenizer: Tokenizer, records: Sequence[Record]
) -> Evaluation:
    """Return the metrics of a classifier, and its most frequent confusions."""
    config = model.config
    kept = [record for record in records if isinstance(record, LabelledRecord)]
    if not kept:
        return Evaluation({})
    texts, expected = [record.text for record in kept], expected_labels(kept, config.labels)
    predicted = predict(model, tokenizer, texts)
    metrics = label_metrics(predicted, expected, len(config.labels), config.multi_label)
    samples = tuple(confusion_lines(texts, predicted, expected, config.labels))
    return Evaluation(metrics, samples, dict.fromkeys(metrics, Method(len(kept))))
