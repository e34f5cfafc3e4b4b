"""Detection of the language of a text by py3langid."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from sightline.base.text.languages import find_language

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

MAX_CHARACTERS = 2_000  # of a text that are read; more change nothing


def detect_languages(text: str, available: Sequence[str]) -> list[tuple[str, float]]:
    """Return the available languages with their probabilities among all that py3langid knows, the
    best first. Languages that it does not know have the probability 0.
    """
    ranked = dict(_identifier().rank(text[:MAX_CHARACTERS]))
    found = [(tag, ranked.get(_label_of(tag) or "", 0.0)) for tag in available]
    return sorted(found, key=lambda pair: -pair[1])


@cache
def _label_of(tag: str) -> str | None:
    return find_language(tag, _identifier().labels)


@cache
def _identifier() -> "LanguageIdentifier":
    """Load the model, which takes a second and 100 MB."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
