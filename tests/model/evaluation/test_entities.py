"""F1 of entities, compared with a slow count of the tags of words, as seqeval counts."""

import random

import pytest

from sightline.model.data.records import Entity
from sightline.model.data.tagged_files import entities_of_tags
from sightline.model.evaluation.entities import count_entities, entity_metrics, error_lines

LABELS = ("A", "B")
TAGS = ("O", *(f"{prefix}-{label}" for label in LABELS for prefix in "BI"))


def chunks(tags: list[str]) -> set[tuple[str, int, int]]:
    """Return the entities of words, with the two rules of conlleval written out."""
    found, begin = set(), 0
    for index in range(len(tags) + 1):
        before = tags[index - 1] if index else "O"
        tag = tags[index] if index < len(tags) else "O"
        differ = before[2:] != tag[2:]
        ends = before != "O" and (tag == "O" or tag[0] == "B" or differ)
        begins = tag != "O" and (before == "O" or tag[0] == "B" or differ)
        if ends:
            found.add((before[2:], begin, index - 1))
        if begins:
            begin = index
    return found


def test_scores_are_those_of_a_slow_count() -> None:
    draw = random.Random(1)
    rows = [[draw.choices(TAGS, k=draw.randrange(8)) for _ in range(2)] for _ in range(300)]
    rows = [[true, guess[: len(true)] + true[len(guess) :]] for true, guess in rows]
    expected, predicted = (
        [frozenset(Entity(*entity) for entity in entities_of_tags(row[side])) for row in rows] for side in (0, 1)
    )
    counts = count_entities(predicted, expected)
    metrics = entity_metrics(counts)
    true = [{(number, *chunk) for number, row in enumerate(rows) for chunk in chunks(row[side])} for side in (0, 1)]

    def scores(right: int, predicted: int, expected: int) -> list[float]:
        precision, recall = right / predicted, right / expected
        return [precision, recall, 2 * precision * recall / (precision + recall)]

    by_label = {}
    for label in LABELS:
        own, guessed = ({chunk for chunk in side if chunk[1] == label} for side in true)
        by_label[label] = scores(len(own & guessed), len(guessed), len(own))
        one = counts[label]
        assert [one.precision, one.recall, one.f1, one.support] == pytest.approx([*by_label[label], len(own)])
    precision, recall, f1 = scores(len(true[0] & true[1]), len(true[1]), len(true[0]))
    macro = sum(values[2] for values in by_label.values()) / len(LABELS)
    assert metrics == pytest.approx(
        {"micro F1": 100 * f1, "macro F1": 100 * macro, "precision": 100 * precision, "recall": 100 * recall}
    )


def test_texts_with_errors_are_shown() -> None:
    right, wrong = Entity(0, 4, "PER"), Entity(5, 7, "LOC")
    texts, expected = ["Anna Li", "Bo"], [frozenset({right}), frozenset[Entity]()]
    assert list(error_lines(texts, [frozenset({wrong}), frozenset()], expected)) == [
        "missed: PER 'Anna'; found wrongly: LOC 'Li'; in: Anna Li"
    ]
