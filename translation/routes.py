"""Routes from one language to another over the models that a service has."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sightline.base.bundle import Languages
from sightline.base.text.languages import find_language


@dataclass(frozen=True)
class Step:
    """A translation by one model."""

    model: Annotated[str, Field(description="Name of the model.")]
    source: Annotated[str, Field(description="Language that it reads, as the model names it.")]
    target: Annotated[str, Field(description="Language that it writes.")]


def find_route(models: Sequence[tuple[str, Languages]], source: str, target: str) -> list[Step]:
    """Return the models that translate one after the other: one, or two with a language between.

    Of several, the one with the closest target is chosen, then the first. The list is empty if
    there is none.
    """
    direct = list(_steps(models, source, target))
    if direct:
        closest = find_language(target, [step.target for step in direct])
        return [next(step for step in direct if step.target == closest)]
    if find_language(target, [source]) is not None:
        return []
    between = dict.fromkeys(tag for _, languages in models for tag in languages.sources)
    for tag in sorted(between, key=lambda tag: find_language("en", [tag]) is None):  # English first
        for first in _steps(models, source, tag):
            for second in _steps(models, first.target, target):
                return [first, second]
    return []


def _steps(models: Iterable[tuple[str, Languages]], source: str, target: str) -> Iterator[Step]:
    for name, languages in models:
        one, other = find_language(source, languages.sources), find_language(target, languages.targets)
        if one is not None and other is not None and one != other:
            yield Step(name, one, other)
