"""Result of a metric during training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """Values of a model on a development set, and sample outputs.

    The first metric decides in a report; `samples` are lines for a reader.
    """

    metrics: dict[str, float]  # such as {"chrF": 55.0, "BLEU": 31.2}; shares are percentages
    samples: tuple[str, ...] = ()


def shortened(text: str, max_characters: int = 120) -> str:
    """Return the start of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= max_characters else line[: max_characters - 1] + "…"
