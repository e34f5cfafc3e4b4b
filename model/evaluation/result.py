"""Values of metrics, and the methods by which they were computed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """Data, search and signature by which a metric was computed."""

    examples: int  # number of texts, pairs or dialogues
    search: str | None = None  # such as "greedy"; None if the model generates nothing
    signature: str | None = None  # of sacreBLEU


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on a data set, and sample outputs as lines for a reader. The first metric
    decides in a report.
    """

    metrics: dict[str, float]  # such as {"chrF": 55.0, "BLEU": 31.2}; shares are percentages
    samples: tuple[str, ...] = ()
    methods: Mapping[str, Method] = field(default_factory=dict)  # by the names of metrics

    def to_record(self, weights: str) -> dict[str, dict[str, Any]]:
        """Return each metric for the record of a run, given weights such as "epoch 7"."""
        return {
            name: {
                "value": round(value, 4),
                "weights": weights,
                **(asdict(self.methods[name]) if name in self.methods else {}),
            }
            for name, value in self.metrics.items()
        }


def shortened(text: str, max_characters: int = 120) -> str:
    """Return the start of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= max_characters else line[: max_characters - 1] + "…"
