"""HTML report of a run: one file with plots and tables, without scripts or other files."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from sightline.loadtest.compare import Change
from sightline.loadtest.load import Measurement
from sightline.loadtest.load_record import LoadRecord
from sightline.loadtest.load_report import DEFINITIONS, TIMES, Distribution, Summary, is_good
from sightline.loadtest.outcome import Failure, Outcome, Rejection, Success
from sightline.loadtest.plots import Line, line_plot, round_up

MAX_INTERVALS = 60  # of the plots over time
MIN_MS = 0.01  # shorter times are drawn as this one
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --muted: #57606a; --page: #fff; --line: #d0d7de;
  --c0: #0072b2; --c1: #d55e00; --c2: #00795c; --c3: #7b3294; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ee; --muted: #a3adb8; --page: #14171b; --line: #3a424c;
  --c0: #56b4e9; --c1: #ff9b57; --c2: #35c79b; --c3: #d29be8; --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--text); background: var(--page);
  max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.invalid { border: 2px solid var(--bad); padding: .5rem 1rem; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 36rem; font-size: 13px; fill: var(--text); }
.grid { stroke: var(--line); } .axis { stroke: var(--muted); } .line { fill: none; stroke-width: 2; }
.line0 { stroke: var(--c0); } .line1 { stroke: var(--c1); } .line2 { stroke: var(--c2); } .line3 { stroke: var(--c3); }
.marker0 { fill: var(--c0); } .marker1 { fill: var(--c1); } .marker2 { fill: var(--c2); } .marker3 { fill: var(--c3); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, .facts td, .facts th { text-align: left; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem; color: var(--muted); overflow-wrap: anywhere; }
"""


def write_page(record: LoadRecord, changes: Sequence[Change], threshold: float, path: Path) -> None:
    """Write the report of a run; steps that return to a rate have no plots over the rate.

    `changes` are between the first and the last tenth of a soak; empty for other profiles.
    """
    summaries = [stage.figures for stage in record.stages]
    rates = [stage.rate for stage in record.stages]
    best = max(range(len(summaries)), key=lambda index: summaries[index].good_per_s)
    measurements = [stage.measurement() for stage in record.stages]
    sections = [
        *_header(record, summaries[best], rates[best]),
        *(_rate_plots([rate or 0.0 for rate in rates], summaries) if len(set(rates)) == len(rates) > 1 else ()),
        *_time_plots(record, measurements),
        _distribution_plot(measurements[best], rates[best] if len(rates) > 1 else None),
        *_tables(record, changes, threshold),
    ]
    title = f"Load test of {record.arguments['url']}"
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{''.join(sections)}</main>\n</body>\n</html>\n",
        encoding="utf-8",
    )


def _header(record: LoadRecord, best: Summary, rate: float | None) -> Iterable[str]:
    if not record.is_valid:
        yield (
            '<p class="invalid"><strong>This run is invalid.</strong> The load test itself lagged by more '
            f"than {1000 * record.arguments['max_lag']:g} ms (99th percentile): it did not measure the service.</p>\n"
        )
    at_rate = "" if rate is None else f" at {rate:g} requests/s"
    limits = ", ".join(f"{TIMES[name][0]} ≤ {1000 * limit:g} ms" for name, limit in record.objectives.items())
    yield (
        f"<p>{record.started_at:%Y-%m-%d %H:%M} UTC, endpoint {escape(record.arguments['endpoint'])}. "
        f"{'Highest goodput' if len(record.stages) > 1 else 'Goodput'}: <strong>{best.good_per_s:.1f} good "
        f"requests/s</strong>{at_rate}, {best.good_share:.1%} of the requests. A request is good if it succeeds"
        f"{' with ' + limits if limits else ''}.</p>\n"
    )


def _figure(title: str, plot: str) -> str:
    return f'<h2>{escape(title)}</h2>\n<div class="wide">{plot}</div>\n'


def _rate_plots(rates: Sequence[float], summaries: Sequence[Summary]) -> Iterable[str]:
    """Yield the plots over the rate: goodput, latency, and time to the first token."""
    title = "Goodput over rate"
    good = [(rate, summary.good_per_s) for rate, summary in zip(rates, summaries, strict=True)]
    offered = [(rate, rate) for rate in sorted(rates)]
    lines = [Line("good requests/s", sorted(good)), Line("requests/s due", offered)]
    yield _figure(title, line_plot(title, "requests/s", "per second", lines))
    for name in ("latency", "ttft"):
        rows = [(rate, times) for rate, summary in zip(rates, summaries, strict=True) if (times := summary.times[name])]
        if rows:
            title = f"{TIMES[name][0].capitalize()} over rate"
            lines = _percentile_lines(rows)
            yield _figure(title, line_plot(title, "requests/s", "ms", lines, log_y=True))


def _percentile_lines(rows: Sequence[tuple[float, Distribution]]) -> list[Line]:
    reads: tuple[tuple[str, Callable[[Distribution], float]], ...] = (
        ("p50", lambda times: times.p50),
        ("p95", lambda times: times.p95),
        ("p99", lambda times: times.p99),
    )
    ordered = sorted(rows, key=lambda pair: pair[0])
    return [Line(label, [(rate, read(times)) for rate, times in ordered]) for label, read in reads]


def _time_plots(record: LoadRecord, measurements: Sequence[Measurement]) -> Iterable[str]:
    """Yield the plots over the time when requests were due: latency, and numbers of requests."""
    requests = sorted(
        (
            (stage.start_s + due_s, outcome)
            for stage, measurement in zip(record.stages, measurements, strict=True)
            for due_s, outcome in zip(measurement.due_s, measurement.outcomes, strict=True)
        ),
        key=lambda pair: pair[0],
    )
    if not requests:
        return
    length_s = round_up(max(requests[-1][0] / MAX_INTERVALS, 0.01))
    parts: list[list[Outcome]] = [[] for _ in range(int(requests[-1][0] / length_s) + 1)]
    for due_s, outcome in requests:
        parts[int(due_s / length_s)].append(outcome)
    middles = [(index + 0.5) * length_s for index in range(len(parts))]
    latencies = [
        Distribution.of_seconds(outcome.latency_s for outcome in part if isinstance(outcome, Success)) for part in parts
    ]
    title, x_label = "Latency over time", f"seconds, in intervals of {length_s:g} s"
    lines = [
        Line("p50", [(middle, times.p50 if times else None) for middle, times in zip(middles, latencies, strict=True)]),
        Line("p95", [(middle, times.p95 if times else None) for middle, times in zip(middles, latencies, strict=True)]),
    ]
    yield _figure(title, line_plot(title, x_label, "ms", lines))

    def count(label: str, is_counted: Callable[[Outcome], bool]) -> Line:
        values = [sum(map(is_counted, part)) / length_s for part in parts]
        return Line(label, list(zip(middles, values, strict=True)))

    def misses(outcome: Outcome) -> bool:
        return isinstance(outcome, Success) and not is_good(outcome, record.objectives)

    title = "Requests and errors over time"
    lines = [
        count("good", lambda outcome: isinstance(outcome, Success) and not misses(outcome)),
        count("objective missed", misses),
        count("rejected", lambda outcome: isinstance(outcome, Rejection)),
        count("failed", lambda outcome: isinstance(outcome, Failure)),
    ]
    shown = [line for line in lines if line is lines[0] or any(value for _, value in line.points)]
    yield _figure(title, line_plot(title, x_label, "per second", shown))


def _distribution_plot(measurement: Measurement, rate: float | None) -> str:
    """Return the cumulative distributions of all times that were measured."""
    successes = [outcome for outcome in measurement.outcomes if isinstance(outcome, Success)]
    lines = []
    for label, read in TIMES.values():
        values = sorted(max(1000 * value, MIN_MS) for success in successes if (value := read(success)) is not None)
        if values:
            ranks = [round(index * (len(values) - 1) / 200) for index in range(201)]
            points = [(values[rank], 100 * (rank + 1) / len(values)) for rank in dict.fromkeys(ranks)]
            lines.append(Line(label, points))
    title = "Distribution" + ("" if rate is None else f" at {rate:g} requests/s")
    return _figure(title, line_plot(title, "ms", "% of responses up to this time", lines, log_x=True)) if lines else ""


def _tables(record: LoadRecord, changes: Sequence[Change], threshold: float) -> Iterable[str]:
    header = ["requests/s", "sent", "rejected", "failed", "good", "good/s", "tokens/s"]
    header += ["p50", "p95", "p99", "ttft p50", "ttft p95", "lag p99"]
    yield "<h2>Figures</h2>\n<p>Times are milliseconds; ttft is the time to first token.</p>\n" + _table(
        header, [_figures(stage.rate, stage.figures) for stage in record.stages]
    )
    reasons = {
        f"{kind}: {name}": sum(getattr(stage.figures, kind).get(name, 0) for stage in record.stages)
        for kind in ("rejected", "failed")
        for name in sorted({name for stage in record.stages for name in getattr(stage.figures, kind)})
    }
    if reasons:
        yield "<h2>Errors</h2>\n" + _table(
            ["error", "requests"], [(name, str(count)) for name, count in reasons.items()]
        )
    if changes:
        rows = [
            (
                change.figure,
                f"{change.before:.4g}",
                f"{change.after:.4g}",
                f"{change.low:+.1%} to {change.high:+.1%}",
                change.verdict(threshold),
            )
            for change in changes
        ]
        yield "<h2>Last tenth after the first tenth</h2>\n"
        yield _table(["figure", "first", "last", "99 % interval of the change", f"beyond {threshold:.0%}"], rows)
    items = {**record.arguments, **record.versions, "commit": record.commit, "started": record.started_at.isoformat()}
    items["processor time of the load test"] = f"{record.client_processor_share:.0%} of one processor"
    yield "<h2>Definitions</h2>\n<dl>" + "".join(
        f"<dt>{escape(line[:24].strip())}</dt><dd>{escape(line[24:])}</dd>" for line in DEFINITIONS.splitlines()
    )
    facts = [(name, str(value)) for name, value in items.items() if value is not None]
    yield f'</dl>\n<h2>Arguments and versions</h2>\n<div class="facts">{_table(["name", "value"], facts)}</div>\n'


def _figures(rate: float | None, summary: Summary) -> list[str]:
    latency, first, lag = summary.latency_ms, summary.time_to_first_token_ms, summary.lag_ms
    times = [latency and latency.p50, latency and latency.p95, latency and latency.p99]
    times += [first and first.p50, first and first.p95, lag and lag.p99]
    return [
        "closed loop" if rate is None else f"{rate:g}",
        *map(str, (summary.sent, sum(summary.rejected.values()), sum(summary.failed.values()))),
        f"{summary.good_share:.1%}",
        f"{summary.good_per_s:.1f}",
        f"{summary.output_tokens_per_s:.0f}",
        *("–" if value is None else f"{value:.1f}" for value in times),
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}</table></div>\n'
