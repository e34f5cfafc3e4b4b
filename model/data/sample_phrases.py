"""Words and sentences of sample data, in sample_phrases.json."""

import json
from pathlib import Path
from typing import Any


def read_phrases(kind: str) -> dict[str, Any]:
    """Return the phrases of `messages`, `trips`, `smalltalk` or `names`."""
    phrases: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[kind]
    return phrases
