"""Result of an evaluation: metrics, the methods by which they were computed, and predictions."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from sightline.base.errors import UsageError
from sightline.model.data.records import DialogueRecord, LabelledRecord, PairRecord, Record, TaggedRecord, TextRecord

RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True)
class Method:
    """Data, search and signature by which a metric was computed."""

    examples: int  # number of texts, pairs or dialogues
    search: str | None = None  # such as "greedy"; None if the model generates nothing
    signature: str | None = None  # of sacreBLEU
    interval: Sequence[float] | None = None  # of 95 %


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on a data set, and sample outputs as lines for a reader. The first metric
    decides in a report.
    """

    metrics: dict[str, float]  # such as {"chrF": 55.0, "BLEU": 31.2}; shares are percentages
    samples: tuple[str, ...] = ()
    methods: Mapping[str, Method] = field(default_factory=dict)  # by the names of metrics
    predictions: Sequence[Mapping[str, Any]] = ()  # each record with the output of the model
    details: Mapping[str, Any] = field(default_factory=dict)  # more fields of a report

    def name_of(self, option: str) -> str:
        """Return the name of the metric of an option. The accuracy of any number of labels is the
        share of exact matches.
        """
        name = option.replace("_f1", " F1")
        return "exact match" if name == "accuracy" and name not in self.metrics else name

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

    def report(self, weights: str) -> dict[str, Any]:
        """Return the fields of a report, without the predictions, for weights as in `to_record`."""
        return {**self.details, "metrics": self.to_record(weights), "samples": list(self.samples)}


Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Share:
    """Number of successes among trials, and the 95 % confidence interval of the true share."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson score interval (Wilson 1927), as shares between 0 and 1."""
        share, z2 = self.value, Z_95**2 / self.total
        middle = share + z2 / 2
        half_width = math.sqrt(z2 * (share * (1 - share) + z2 / 4))
        return (middle - half_width) / (1 + z2), (middle + half_width) / (1 + z2)

    @property
    def percent_interval(self) -> list[float]:
        """`interval` in percent, rounded for a report."""
        return [round(100 * end, 2) for end in self.interval]


DESCRIPTIONS = {
    PairRecord: "pairs",
    LabelledRecord: "labelled texts",
    TaggedRecord: "texts with entities",
    TextRecord: "texts",
    DialogueRecord: "dialogues",
}


def only(records: Sequence[Record], *kinds: type[RecordT]) -> list[RecordT]:
    """Return records of these kinds. Raises `UsageError` if there are others."""
    for record in records:
        if not isinstance(record, kinds):
            needed = " or ".join(DESCRIPTIONS[kind] for kind in kinds)
            raise UsageError(f"the model is evaluated on {needed}, but the data has {DESCRIPTIONS[type(record)]}")
    return [record for record in records if isinstance(record, kinds)]


NUM_SAMPLES, NUM_WORST = 3, 5
# Fields of predictions that tell how good one is, and True if the largest is the worst.
_QUALITIES = {"probability": False, "chrF": False, "perplexity": True, "rank": True, "wrong": True}


def worst_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the worst predictions of a report, with shortened texts."""
    quality = next((name for name in _QUALITIES if name in rows[0]), None)
    if quality is None:  # scores of pairs, which say little alone
        return []
    known = [row for row in rows if row[quality] is not None]
    return [*map(_brief, sorted(known, key=lambda row: row[quality], reverse=_QUALITIES[quality])[:NUM_WORST])]


def sample_lines(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Show the first predictions, one in a line."""
    return tuple(
        " | ".join(f"{name}: {value}" for name, value in row.items()) for row in map(_brief, rows[:NUM_SAMPLES])
    )


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prediction with shortened texts."""
    return {
        name: value
        if isinstance(value, int | float)
        else shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in row.items()
    }


def shortened(text: str, max_characters: int = 120) -> str:
    """Return the start of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= max_characters else line[: max_characters - 1] + "…"
