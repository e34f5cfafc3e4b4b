"""Results as Markdown, written into the documents between two marks."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.bars import BARS, Bar
from bench.record import Figure, Recorded, Row

END = "<!-- end of figures -->"
Results = Mapping[str, Recorded]


def mark(part: str, writer: str = "make bench") -> str:
    return f"<!-- figures: {part}, written by `{writer}` -->"


def write_into(document: Path, part: str, text: str, writer: str = "make bench") -> None:
    """Replace what stands between the marks of a part; nothing where the document has no such marks."""
    whole, start = document.read_text(encoding="utf-8"), mark(part, writer)
    if start not in whole:
        return
    before, rest = whole.split(start)
    _, after = rest.split(END, maxsplit=1)
    document.write_text(f"{before}{start}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def parts(results: Results) -> dict[str, str]:
    """What can be written, by the part's name."""
    return {
        "bars": bars_table(results),
        "library": "\n\n".join(_library(title, results.get(name)) for name, title in LIBRARIES.items()),
        "servers": "\n\n".join(_servers(title, results.get(name)) for name, title in SERVERS.items()),
        "mixed": _mixed(results.get("mixed")),
        "guidellm": _guidellm(results.get("guidellm")),
        "machines": machines(results),
    }


LIBRARIES = {
    "library-base": "6 + 6 layers, d 512, ffn 2048, vocabulary 58,101, random weights, 20 tokens a sentence",
    "library-tiny": "The shipped model, sentences to their natural ends",
}
SERVERS = {"server-base": "6 + 6 layers, d 512, grown from the shipped model", "server-tiny": "The shipped model"}


def all_figures(results: Results) -> dict[str, Figure]:
    return {name: figure for recorded in results.values() for name, figure in recorded.result.figures.items()}


def bars_table(results: Results, bars: Sequence[Bar] = BARS) -> str:
    figures = all_figures(results)
    rows = []
    for bar in bars:
        figure = figures.get(bar.figure)
        sign = "<=" if bar.better == "lower" else ">="
        if figure is None:
            rows.append([bar.text, "not measured", f"{sign} {bar.limit:g}", "-"])
        else:
            limit = f"{sign} {bar.limit:g} {figure.unit}"
            rows.append([bar.text, f"{figure.value:.3g} {figure.unit}", limit, _yes(bar.is_met(figure))])
    return table(["figure", "measured", "bar", "met"], rows)


def machines(results: Results) -> str:
    """Where each section was measured; sections of one run together."""
    groups: dict[str, list[str]] = {}
    for name, recorded in results.items():
        commits = sorted({row["commit"] for row in recorded.result.rows if "commit" in row})
        kept = f" (some of its rows at {', '.join(commits)})" if commits else ""
        groups.setdefault(_machine(recorded.machine), []).append(f"`{name}`{kept}")
    return "\n".join(f"- {', '.join(names)}: {machine}" for machine, names in groups.items())


def _machine(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}, {versions}, commit {facts['commit']}."
    )


def _library(title: str, recorded: Recorded | None) -> str:
    """Tokens a second of each contender, a column a case."""
    if recorded is None:
        return f"**{title}**: not measured."
    cases = _cases(recorded.result.rows, "decoding", "rows")
    names = list(dict.fromkeys(row["contender"] for row in recorded.result.rows))
    found = {(row["contender"], row["decoding"], row["rows"]): row for row in recorded.result.rows}
    body = [
        [name, *(f"{found[name, *case]['tokens_per_s']:,.0f}" if (name, *case) in found else "" for case in cases)]
        for name in names
    ]
    head = ["tokens a second", *(f"{decoding}, {rows}" for decoding, rows in cases)]
    return f"**{title}**\n\n{table(head, body)}"


def _servers(title: str, recorded: Recorded | None) -> str:
    if recorded is None:
        return f"**{title}**: not measured."
    body = [
        [
            f"{row['decoding']}, {row['load']}",
            f"{row['server']} ({row['settings']})",
            *(f"{statistics.median(row[column]):.1f}" for column in ("requests_per_s", "p50_ms", "p99_ms")),
            f"{row['refused']} of {row['sent']}",
        ]
        for row in recorded.result.rows
    ]
    return f"**{title}**\n\n{table(['load', 'server', 'requests/s', 'p50 ms', 'p99 ms', 'refused'], body)}"


def _mixed(recorded: Recorded | None) -> str:
    if recorded is None:
        return "Not measured."
    body = [
        [row["load"], *(f"{row[what][part]:.1f}" for what in ("first_token_ms", "gap_ms") for part in ("p50", "p99"))]
        for row in recorded.result.rows
    ]
    encode = recorded.result.figures["mixed.encode"].value
    text = table(["streams", "first token p50 ms", "p99 ms", "between tokens p50 ms", "p99 ms"], body)
    return f"{text}\n\nOne encode of the token budget, asked for alone, takes {encode:.0f} ms."


def _guidellm(recorded: Recorded | None) -> str:
    if recorded is None:
        return "Not measured."
    head = ["load", "requests/s", "at once", "first token p50 ms", "p95 ms", "between tokens p50 ms", "p95 ms"]
    body = [
        [
            row["step"] if row["rate"] is None else f"{row['step']}, {row['rate']:.1f} a second",
            *(f"{row[name]:.1f}" for name in ("requests_per_s", "concurrency")),
            *(f"{row[what][part]:.1f}" for what in ("first_token_ms", "gap_ms") for part in ("p50", "p95")),
            f"{row['tokens_per_s']:,.0f}",
            *(str(row[name]) for name in ("whole", "cut_off", "failed")),
        ]
        for row in recorded.result.rows
    ]
    return f"`{recorded.command}`\n\n{table([*head, 'tokens/s', 'whole', 'cut off', 'failed'], body)}"


def _cases(rows: Sequence[Row], *columns: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[column] for column in columns) for row in rows))


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
