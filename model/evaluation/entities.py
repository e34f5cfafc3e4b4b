"""F1 of the entities of a tagger, as seqeval counts them: an entity is right if its first and last
character and its label are.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from sightline.model.architectures.factory import TaggingModel
from sightline.model.data.records import Entity, Record, TaggedRecord
from sightline.model.data.tags import entities_of, windows
from sightline.model.evaluation.accuracy import NUM_SAMPLES, Counts, count_labels, f1_metrics, label_fields, total
from sightline.model.evaluation.length_groups import outputs_of
from sightline.model.evaluation.result import Evaluation, Method, only, shortened

Entities = Sequence[frozenset[Entity]]  # of each text


def predict_entities(model: TaggingModel, tokenizer: Tokenizer, texts: Sequence[str]) -> list[frozenset[Entity]]:
    """Return the entities of each text, by the most likely tag of each token."""
    found = enumerate(windows(tokenizer, texts, model.config.max_positions))
    parts = [(index, window) for index, text in found for window in text]
    predicted = [frozenset[Entity]()] * len(texts)
    for (index, window), scores in zip(parts, outputs_of(model, [window.ids for _, window in parts]), strict=True):
        tags = scores[: len(window.ids)].argmax(dim=-1).tolist()  # scores of labels (S, C)
        predicted[index] |= {*entities_of(window, [model.config.labels[tag] for tag in tags])}
    return predicted


def count_entities(predicted: Entities, expected: Entities) -> dict[str, Counts]:
    """Return the numbers of entities of each label that occurs."""
    return count_labels(predicted, expected, lambda entity: entity.label)


def entity_metrics(counts: Mapping[str, Counts]) -> dict[str, float]:
    """Return the metrics of a tagger in percent."""
    sums = total(counts.values())
    return {**f1_metrics(counts), "precision": 100 * sums.precision, "recall": 100 * sums.recall}


def error_lines(texts: Sequence[str], predicted: Entities, expected: Entities) -> list[str]:
    """Describe the first texts whose entities are not all right."""

    def named(text: str, entities: frozenset[Entity]) -> str:
        ordered = sorted(entities, key=lambda one: one.start)
        return ", ".join(f"{one.label} {shortened(text[one.start : one.end], 40)!r}" for one in ordered) or "none"

    wrong = [row for row in zip(texts, predicted, expected, strict=True) if row[1] != row[2]]
    return [
        f"missed: {named(text, true - guess)}; found wrongly: {named(text, guess - true)}; in: {shortened(text)}"
        for text, guess, true in wrong[:NUM_SAMPLES]
    ]


def _listed(entities: Iterable[Entity]) -> list[list[Any]]:
    return sorted([entity.start, entity.end, entity.label] for entity in entities)


def evaluate_tagging(model: TaggingModel, tokenizer: Tokenizer, records: Sequence[Record]) -> Evaluation:
    """Return the metrics of a tagger, in total and by label, and texts with errors."""
    tagged = only(records, TaggedRecord)
    texts, expected = [record.text for record in tagged], [frozenset(record.entities) for record in tagged]
    predicted = predict_entities(model, tokenizer, texts)
    counts = count_entities(predicted, expected)
    metrics = entity_metrics(counts)
    predictions = [
        {"text": text, "expected": _listed(right), "predicted": _listed(found), "wrong": len(right ^ found)}
        for text, right, found in zip(texts, expected, predicted, strict=True)
    ]
    return Evaluation(
        metrics,
        tuple(error_lines(texts, predicted, expected)),
        dict.fromkeys(metrics, Method(len(texts))),
        predictions,
        {"labels": label_fields(counts, "entities")},
    )
