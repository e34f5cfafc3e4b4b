"""Detection of the language of a text by py3langid."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from sightline.base.text.languages import find_language

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

MAX_CHARACTERS = 2_000  # of a text that are read; more change nothing


def detect_languages(text: str, available: Sequence[str]) -> list[tuple[str, float]]:
    """Return the available languages that the text may have with their probabilities, the best
    first. Languages that py3langid does not know are left out.
    """
    ranked = dict(_identifier().rank(text[:MAX_CHARACTERS]))
    found = {tag: ranked[code] for tag in available if (code := find_language(tag, ranked)) is not None}
    total = sum(found.values()) or 1.0
    return sorted(((tag, value / total) for tag, value in found.items()), key=lambda pair: -pair[1])


@cache
def _identifier() -> "LanguageIdentifier":
    """Load the model, which takes a second and 100 MB."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
