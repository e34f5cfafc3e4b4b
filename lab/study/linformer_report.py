"""The tables and the picture of the step `linformer`, and the lengths at which Linformer overtakes
softmax attention.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.bench.style import (
    BLACK,
    BLUE,
    GREY,
    WIDTH,
    LineLabel,
    describe,
    format_number,
    label_lines,
    save,
    style,
    use_log_scale,
)

Measure = Callable[[Row], float]
IsLess = Callable[[Row, Row], bool]

SHOWN = (None, 32, 128)  # numbers of projected keys in the tables of times; the picture has all
BASELINES = {"operator": "softmax, one operator", "plain": "softmax, single operators"}
LINES = {  # by kind: colour, marker
    ("operator", None): (BLUE, "o"),
    ("plain", None): (GREY, "s"),
    ("linformer", 32): ("#e8945a", "^"),
    ("linformer", 64): ("#d55e00", "v"),
    ("linformer", 128): ("#a34700", "D"),
    ("linformer", 256): ("#5e2900", "P"),
}


def milliseconds(row: Row) -> float:
    return float(statistics.median(row["ms"]))


def peak_mb(row: Row) -> float:
    return float(row["peak_mb"])


def is_faster(ours: Row, theirs: Row) -> bool:
    """Return True if all rounds but at most one are faster. Rounds are paired, so a disturbance
    affects both.
    """
    lost = [one >= other for one, other in zip(ours["ms"], theirs["ms"], strict=True)]
    return lost.count(True) <= min(1, (len(lost) - 1) // 2)


def is_smaller(ours: Row, theirs: Row) -> bool:
    """Return True if the peak is at least one megabyte lower; smaller differences are noise of a
    single measurement.
    """
    return peak_mb(ours) <= peak_mb(theirs) - 1


def crossover(is_less: Mapping[int, bool]) -> str:
    """Return the smallest number of tokens from which `is_less` holds at every longer length that
    was measured.
    """
    if not is_less:
        return "not measured"
    tokens = [one for one in sorted(is_less) if all(less for other, less in is_less.items() if other >= one)]
    return f"{tokens[0]:,}" if tokens else f"none up to {max(is_less):,}"


def tables(result: Result) -> Mapping[str, str]:
    """Return the tables of time and memory, crossovers, the cost of maps, and a short sentence."""
    facts, *rows = result.rows
    plain, with_maps = [row for row in rows if not row["maps"]], [row for row in rows if row["maps"]]
    counts = list(dict.fromkeys(row["rows"] for row in rows))
    head = (
        f"One layer, width {facts['d_model']}, {facts['num_heads']} heads, projections included, float32, "
        f"{facts['threads']} {'thread' if facts['threads'] == 1 else 'threads'}, one row; medians of "
        f"{len(rows[0]['ms'])} rounds."
    )
    return {
        "linformer": f"{head}\n\n{_grid(_with_rows(plain, 1), _cell, 'ms, MB')}",
        "linformer-crossover": _crossovers(plain, counts),
        "linformer-maps": _grid(with_maps, _with_over_without(plain), "ms (ratio), MB"),
        "linformer-short": _short(facts["short"], [row for row in plain if "short_ms" in row]),
    }


def _with_rows(rows: Sequence[Row], count: int) -> list[Row]:
    return [row for row in rows if row["rows"] == count]


def _kind(row: Row) -> tuple[str, int | None]:
    return row["attention"], row["slots"]


def _label(kind: tuple[str, int | None]) -> str:
    attention, slots = kind
    return BASELINES[attention] if slots is None else f"Linformer, k = {slots}"


def _kinds(rows: Sequence[Row]) -> list[tuple[str, int | None]]:
    """Return the kinds of attention: baselines first, then Linformers by their number of projected
    keys.
    """
    return sorted({_kind(row) for row in rows}, key=lambda kind: (kind[1] or 0, kind[0]))


def _grid(rows: Sequence[Row], cell: Callable[[Row], str], units: str) -> str:
    """Return a table with a row for each length and a column for each kind of attention."""
    kinds = [kind for kind in _kinds(rows) if kind[1] in SHOWN]
    found = {(row["tokens"], _kind(row)): row for row in rows}
    lengths = sorted({row["tokens"] for row in rows})
    body = [
        [f"{tokens:,}", *(cell(found[tokens, kind]) if (tokens, kind) in found else "" for kind in kinds)]
        for tokens in lengths
    ]
    return table(["n", *(f"{_label(kind)}: {units}" for kind in kinds)], body)


def _cell(row: Row) -> str:
    return f"{_number(milliseconds(row))}, {peak_mb(row):,.0f}"


def _with_over_without(plain: Sequence[Row]) -> Callable[[Row], str]:
    """Return a cell function: time with maps, its ratio to the time without, and peak memory."""
    found = {(row["rows"], row["tokens"], _kind(row)): row for row in plain}

    def cell(row: Row) -> str:
        without = found[row["rows"], row["tokens"], _kind(row)]
        return f"{_number(milliseconds(row))} ({milliseconds(row) / milliseconds(without):.1f}), {peak_mb(row):,.0f}"

    return cell


def _number(value: float) -> str:
    """Format with three significant digits, and never fewer than those before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _crossovers(rows: Sequence[Row], counts: Sequence[int]) -> str:
    """Return a table with a row for each number of projected keys; cells have the lengths for each
    number of rows.
    """
    body = []
    for size in sorted({row["slots"] for row in rows if row["slots"] is not None}):
        cells = []
        for is_less in (is_faster, is_smaller):
            for name in BASELINES:
                lengths = [
                    crossover(
                        _compare(
                            [row for row in _with_rows(rows, count) if row["slots"] == size],
                            _baseline(rows, count, name),
                            is_less,
                        )
                    )
                    for count in counts
                ]
                cells.append(" / ".join(lengths))
        body.append([str(size), *cells])
    head = [f"{word} than {name}" for word in ("faster", "smaller") for name in BASELINES.values()]
    return table(["k", *head], body)


def _baseline(rows: Sequence[Row], count: int, name: str) -> list[Row]:
    return [row for row in _with_rows(rows, count) if row["attention"] == name]


def _compare(ours: Sequence[Row], theirs: Sequence[Row], is_less: IsLess) -> dict[int, bool]:
    """Compare at each length at which both were measured."""
    found = {row["tokens"]: row for row in theirs}
    return {row["tokens"]: is_less(row, found[row["tokens"]]) for row in ours if row["tokens"] in found}


def _by_tokens(rows: Sequence[Row], measure: Measure) -> dict[int, float]:
    return {row["tokens"]: measure(row) for row in rows}


def _short(tokens: int, rows: Sequence[Row]) -> str:
    """Return the sentence on a short text, at its own length and padded to the longest one."""
    longest = max(row["tokens"] for row in rows)
    times = [
        f"{_label(_kind(row))} {_number(statistics.median(row['short_ms']))}"
        + ("" if row["slots"] is None else f" ({_number(statistics.median(row['padded_ms']))} padded)")
        for row in rows
        if row["tokens"] == longest and row["slots"] in SHOWN
    ]
    return f"Milliseconds for {tokens} tokens, in a layer for at most {longest:,}: {', '.join(times)}."


def draw(result: Result, folder: Path) -> None:
    """Write `linformer.svg`: time and memory of one row by the number of tokens."""
    _, *rows = result.rows
    rows = [row for row in rows if row["rows"] == 1 and not row["maps"]]
    with style():
        figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(WIDTH, 6.6))
        upper.set_title("Time")
        lower.set_title("Peak memory of the process")
        title = "One attention layer over one sequence, by the length of the sequence"
        describe(figure, title, "Both axes are logarithmic. k is the number of projected keys of a Linformer.")
        _draw_lines(upper, rows, milliseconds, "milliseconds, median")
        _draw_lines(lower, rows, peak_mb, "MB")
        save(figure, folder / "linformer.svg")


def _draw_lines(axes: Axes, rows: Sequence[Row], measure: Measure, unit: str) -> None:
    use_log_scale(axes, "x")
    use_log_scale(axes, "y")
    labels = []
    for kind in _kinds(rows):
        values = _by_tokens([row for row in rows if _kind(row) == kind], measure)
        colour, marker = LINES.get(kind, (BLACK, "x"))
        axes.plot(list(values), list(values.values()), marker=marker, color=colour)
        labels.append(LineLabel(_label(kind), max(values), values[max(values)], colour))
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xticks(lengths, [format_number(tokens) for tokens in lengths])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel(unit)
    label_lines(axes, labels)
