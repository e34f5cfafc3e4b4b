"""Routes between languages, and marks through two translations."""

import pytest

from sightline.base.bundle import Languages
from sightline.translation.marks import Mark, MarkedText, PlacedMark, TranslatedText, as_source, chained, unchanged
from sightline.translation.routes import find_route
from tests.support.tables import read_table


@pytest.mark.parametrize(("models", "pair", "route"), read_table(__file__))
def test_the_shortest_route_with_the_closest_target_is_chosen(
    models: dict[str, str], pair: str, route: list[str]
) -> None:
    def languages(pairs: str) -> Languages:
        sources, targets = (side.split(",") for side in pairs.split(" "))
        return Languages(sources=tuple(sources), targets=tuple(targets))

    found = find_route([(name, languages(pairs)) for name, pairs in models.items()], *pair.split(" "))
    assert [f"{step.model} {step.source} {step.target}" for step in found] == route


def test_marks_keep_their_parents_and_their_names_through_two_translations() -> None:
    source = MarkedText("a b c", [Mark(0, 1), Mark(2, 5), Mark(4, 5, "keep", parent=1)])
    assert as_source(source, unchanged(source)) == source
    first = TranslatedText("c B A", [PlacedMark(1, 0, 3, 0.5), PlacedMark(2, 0, 1), PlacedMark(0, 4, 5, 0.7)])
    between = as_source(source, first)
    assert between == MarkedText("c B A", [Mark(0, 3), Mark(0, 1, "keep", parent=0), Mark(4, 5)])
    second = TranslatedText("X Y c", [PlacedMark(2, 0, 1, 0.6), PlacedMark(0, 2, 5, 0.9), PlacedMark(1, 4, 5)])
    assert chained(first, second).marks == [PlacedMark(0, 0, 1, 0.6), PlacedMark(1, 2, 5, 0.5), PlacedMark(2, 4, 5)]
