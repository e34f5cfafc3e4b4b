"""Messages to a shop, each with one of five labels: data for a classifier.

Messages are drawn from sentences with gaps. They mention other topics in passing, have typing
errors, and some could have two labels, so that no classifier is always right. Every fourth sentence
is only used in dev and test.
"""

import random
from collections.abc import Mapping

from sightline.model.data.sample_phrases import read_phrases

LABELS = ("billing", "delivery", "praise", "returns", "technical")

# `decisive` sentences decide the label, `asides` may stand in any message, and `unclear` ones could
# have either of two labels, of which the writer of the data has chosen one.
_PHRASES = read_phrases("messages")
_SHARE_UNCLEAR = 0.05


def draw_messages(seed: int, sizes: Mapping[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Return texts and labels by part, without duplicates; `sizes` has the number of each label."""
    draw = random.Random(seed)  # noqa: S311 - not for security
    seen = set[str]()
    parts: dict[str, list[tuple[str, str]]] = {}
    for part, size in sizes.items():
        rows = []
        for label in LABELS:
            cores = [
                core for index, core in enumerate(_PHRASES["decisive"][label]) if part != "train" or index % 4 != 3
            ]
            unclear = [text for pair in _PHRASES["unclear"] if label in pair["labels"] for text in pair["sentences"]]
            count = 0
            while count < size:
                text = _message(draw, draw.choice(unclear if draw.random() < _SHARE_UNCLEAR else cores))
                if text not in seen:
                    seen.add(text)
                    rows.append((text, label))
                    count += 1
        draw.shuffle(rows)
        parts[part] = rows
    return parts


def _message(draw: random.Random, core: str) -> str:
    asides = draw.sample(_PHRASES["asides"], k=draw.choice((0, 0, 1, 1, 2)))
    sentences = [core, *asides]
    draw.shuffle(sentences)
    text = " ".join(filter(None, [draw.choice(_PHRASES["openings"]), *sentences, draw.choice(_PHRASES["closings"])]))
    # Each gap has its own value.
    while "{" in text:
        before, _, rest = text.partition("{")
        name, _, after = rest.partition("}")
        text = before + draw.choice(_PHRASES["gaps"][name]) + after
    return _mistyped(draw, text) if draw.random() < 0.3 else text


def _mistyped(draw: random.Random, text: str) -> str:
    """Swap two neighbouring letters, leave out one, or write everything in lower case."""
    index = draw.randrange(1, len(text) - 2)
    return draw.choice(
        (
            text.lower(),
            text[:index] + text[index + 1] + text[index] + text[index + 2 :],
            text[:index] + text[index + 1 :],
        )
    )
