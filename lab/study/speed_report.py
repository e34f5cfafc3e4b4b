"""The table of the step `speed`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.zoo.systems import COMPARED, MULTI30K, SYSTEMS
from sightline.model.training.train_config import PRECISIONS

REFERENCE = "transformer"  # speeds of the others are divided by its speed
# Systems of the short table: those that are compared, and the extremes.
SHOWN = (REFERENCE, *COMPARED, "hard-marginal", "linformer", "sentiment", "chat-gatt")


def training_minutes(row: Row) -> float:
    """Estimate the minutes of a whole run from its timed updates in the run's own precision."""
    return float(statistics.median(row["update_ms"][row["precision"]]) * row["updates"] / 60_000)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Divide round by round, because a disturbance affects both values of a round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def tables(result: Result) -> Mapping[str, str]:
    """Return the tables of training and decoding, of some systems and of all."""
    settings, *rows = result.rows
    speeds = {row["system"]: row.get("tokens_per_s", {}) for row in rows}
    counts = list(dict.fromkeys(count for speed in speeds.values() for count in speed))
    reference = speeds.get(REFERENCE, {})
    head = ["system", *(f"ms per update, {each}" for each in PRECISIONS), "training, minutes"]
    head += [f"speed served, {count} at once" for count in counts]
    body = {
        row["system"]: [
            f"`{row['system']}`",
            *_training(row),
            *(_speed(row, reference, count) for count in counts),
        ]
        for row in rows
    }
    short = [cells for system, cells in body.items() if system in SHOWN]
    threads = settings["threads"]
    decoded = max((len(speed) for each in speeds.values() for speed in each.values()), default=0)
    trained = max((len(row["update_ms"][each]) for row in rows if "update_ms" in row for each in PRECISIONS), default=0)
    text = (
        f"{threads} {'thread' if threads == 1 else 'threads'}; medians of rounds in which all systems take turns: "
        f"{trained} of {settings['updates_a_round']} updates, {decoded} of decoding.{_spread(rows)}"
    )
    return {"speed": f"{table(head, short)}\n\n{text}", "speed-all": table(head, list(body.values()))}


def _spread(rows: Sequence[Row]) -> str:
    """Return a sentence on the largest spread between the rounds of an update."""
    times = [row["update_ms"][each] for row in rows if "update_ms" in row for each in PRECISIONS]
    most = max((max(one) / min(one) - 1 for one in times), default=0)
    return f" The slowest round of updates takes up to {most:.0%} longer than the fastest." if most else ""


def _training(row: Row) -> list[str]:
    if "update_ms" not in row:
        return [""] * (len(PRECISIONS) + 1)
    times = [f"{statistics.median(row['update_ms'][each]):,.0f}" for each in PRECISIONS]
    return [*times, f"{training_minutes(row):.0f}"]


def _speed(row: Row, theirs: Mapping[str, Any], count: str) -> str:
    """Return the speed over that of the reference with its range, or tokens per second where there
    is no comparison.
    """
    ours = row.get("tokens_per_s", {})
    if count not in ours:
        return ""
    # Chat systems generate other texts, so that their tokens per second are not comparable.
    if row["system"] == REFERENCE or count not in theirs or SYSTEMS[row["system"]].corpus != MULTI30K:
        return f"{statistics.median(ours[count]):,.0f} tokens/s"
    each = ratios(ours[count], theirs[count])
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
