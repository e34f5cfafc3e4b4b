"""F1 of the entities of a tagger, as seqeval counts them: an entity is right if its first and last
character and its label are.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

from sightline.model.architectures.factory import TaggingModel
from sightline.model.data.records import Entity, Record, TaggedRecord
from sightline.model.data.tags import entities_of, windows
from sightline.model.evaluation.accuracy import NUM_SAMPLES, Counts, label_fields, macro_f1, total
from sightline.model.evaluation.length_groups import device_of, grouped, padded
from sightline.model.evaluation.result import Evaluation, Method, shortened

Entities = Sequence[frozenset[Entity]]  # of each text


@torch.inference_mode()
def predict_entities(model: TaggingModel, tokenizer: Tokenizer, texts: Sequence[str]) -> list[frozenset[Entity]]:
    """Return the entities of each text, by the most likely tag of each token."""
    config, device = model.config, device_of(model)
    found = enumerate(windows(tokenizer, texts, config.max_positions))
    parts = [(index, window) for index, text in found for window in text]
    predicted = [frozenset[Entity]()] * len(texts)
    for group in grouped([len(window.ids) for _, window in parts]):
        scores = model(*padded([parts[number][1].ids for number in group], config.pad_id, device))  # (B, S, C)
        for number, indices in zip(group, scores.argmax(dim=-1).tolist(), strict=True):
            index, window = parts[number]
            predicted[index] |= {*entities_of(window, [config.labels[tag] for tag in indices[: len(window.ids)]])}
    return predicted


def count_entities(predicted: Entities, expected: Entities) -> dict[str, Counts]:
    """Return the numbers of entities of each label that occurs."""
    pairs = list(zip(predicted, expected, strict=True))
    right, wrong, missed = (
        Counter(entity.label for entities in found for entity in entities)
        for found in ([a & b for a, b in pairs], [a - b for a, b in pairs], [b - a for a, b in pairs])
    )
    return {label: Counts(right[label], wrong[label], missed[label]) for label in sorted({*right, *wrong, *missed})}


def entity_metrics(counts: Sequence[Counts]) -> dict[str, float]:
    """Return the metrics of a tagger in percent."""
    sums = total(counts)
    values = {"micro F1": sums.f1, "macro F1": macro_f1(counts), "precision": sums.precision, "recall": sums.recall}
    return {name: 100 * value for name, value in values.items()}


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


def tagging_fields(model: TaggingModel, tokenizer: Tokenizer, records: Sequence[Record]) -> dict[str, Any]:
    """Return the metrics of a tagger, in total and by label, and errors, as fields of a report."""
    tagged = [record for record in records if isinstance(record, TaggedRecord)]
    texts, expected = [record.text for record in tagged], [frozenset(record.entities) for record in tagged]
    predicted = predict_entities(model, tokenizer, texts)
    counts = count_entities(predicted, expected)
    return {
        "task": "tagging",
        "sentences": len(texts),
        "metrics": {name: round(value, 2) for name, value in entity_metrics(list(counts.values())).items()},
        "labels": label_fields(list(counts.values()), list(counts), "entities"),
        "samples": error_lines(texts, predicted, expected),
        "predictions": [
            {"text": text, "expected": _listed(right), "predicted": _listed(found), "wrong": len(right ^ found)}
            for text, right, found in zip(texts, expected, predicted, strict=True)
        ],
    }


def _listed(entities: Iterable[Entity]) -> list[list[Any]]:
    return sorted([entity.start, entity.end, entity.label] for entity in entities)


def evaluate_tagging(model: TaggingModel, tokenizer: Tokenizer, records: Sequence[Record]) -> Evaluation:
    """Return the metrics of a tagger, and texts with errors."""
    fields = tagging_fields(model, tokenizer, records)
    return Evaluation(
        fields["metrics"], tuple(fields["samples"]), dict.fromkeys(fields["metrics"], Method(fields["sentences"]))
    )
