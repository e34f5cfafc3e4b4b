"""Format results as Markdown and write them into documents between marks."""

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.bench.record import Figure, Recorded, Row
from lab.bench.targets import COMPARISONS, HEADLINE, MAX_COMMITS, RELIABILITY, TARGETS, Comparison, Target

DOCUMENTS = (
    Path("docs/performance.md"),
    Path("docs/explanation/reliability.md"),
    Path("lab/docs/overload.md"),
    Path("docs/how-to/ray.md"),
    Path("README.md"),
)
END = "<!-- end of figures -->"
MAX_WIDTH = 100  # columns of prose in Markdown
MIN_ROUNDS = 3
MAX_ROWS = 11  # of a table of samples over time, the first of which is at 0
Results = Mapping[str, Recorded]


def mark(part: str, writer: str = "make bench") -> str:
    return f"<!-- figures: {part}, written by `{writer}` -->"


def write_into(document: Path, part: str, text: str, writer: str = "make bench") -> None:
    """Replace the text between the marks of a part, if there are any, with wrapped prose."""
    whole, start = document.read_text(encoding="utf-8"), mark(part, writer)
    if start not in whole:
        return
    before, rest = whole.split(start)
    _, after = rest.split(END, maxsplit=1)
    document.write_text(f"{before}{start}\n\n{wrap_prose(text)}\n\n{END}{after}", encoding="utf-8")


def wrap_prose(markdown: str) -> str:
    """Wrap prose lines at 100 columns. Tables, code, links alone and HTML keep their lines."""
    lines: list[str] = []
    in_code = False
    for line in markdown.split("\n"):
        in_code ^= line.startswith("```")
        if in_code or len(line) <= MAX_WIDTH or line.startswith(("|", "<", "![", "[")):
            lines.append(line)
            continue
        unbroken = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), line)
        indent = "  " if line.startswith("- ") else ""
        wrapped = textwrap.wrap(
            unbroken, MAX_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += [part.replace("\0", " ") for part in wrapped]
    return "\n".join(lines)


def write_documents(results: Results, documents: Iterable[Path] = DOCUMENTS) -> None:
    """Write every part that is marked in the documents."""
    for document in documents:
        for part in re.findall(mark("([^,]+)"), document.read_text(encoding="utf-8")):
            write_into(document, part, text_of(part, results).replace("| --- ", "|---"))


def text_of(part: str, results: Results) -> str:
    """Return the text of a part: the table of a section, or a summary of all."""
    summaries: dict[str, Callable[[Results], str]] = {
        "targets": targets_table,
        "reliability": lambda results: targets_table(results, RELIABILITY),
        "fresh": lambda _: FRESH,
        "readme": lambda results: comparisons_table(results, HEADLINE),
        "comparisons": comparisons_table,
        "machines": machines,
    }
    return summaries[part](results) if part in summaries else section_table(part, results.get(part))


FRESH = (
    "The three rows of the README are the first of the models. `make bench-readme` measures them again after at most "
    f"{MAX_COMMITS} commits that change files on which they depend, as listed in `lab/bench/fresh.py`; with more, "
    "`make check` fails. The other figures have no such limit, but name their commit."
)
METRICS = {"requests/s": ("requests/s", "tokens/s"), "p50": ("p50 ms",), "p99": ("p99 ms",)}  # columns, and figures


def comparisons_table(results: Results, comparisons: Sequence[Comparison] = COMPARISONS) -> str:
    """Return a row for each comparison, with the ratios for each number of clients. Those that are
    worse for Sightline are bold.
    """
    figures = all_figures(results)
    rows = []
    for each in comparisons:
        values = [figures_of(figures, each, names) for names in METRICS.values()]
        clients = "/".join(map(str, values[0])) or "not measured"
        cells = [
            "/".join(_ratio(figure, is_time) for figure in by_clients.values())
            for is_time, by_clients in zip((False, True, True), values, strict=True)
        ]
        rows.append([each.model, each.peer, clients, *cells, f"`{each.section}`"])
    measured = [recorded for name, recorded in results.items() if name in {each.section for each in comparisons}]
    notes = ["These ratios are preliminary, from short runs."] if any(map(_preliminary, measured)) else []
    return "\n\n".join([table(["model", "over", "clients", *METRICS, "section"], rows), *notes])


def figures_of(figures: Mapping[str, Figure], comparison: Comparison, metrics: Sequence[str]) -> dict[int, Figure]:
    """Return the ratio to the fastest peer for each number of clients, in any of the metrics."""
    names = {name.removeprefix(comparison.figures): name for name in figures if name.startswith(comparison.figures)}
    wanted = {f"{metric}.best" for metric in metrics}
    split = ((short.partition("."), name) for short, name in names.items())
    return {int(clients): figures[name] for (clients, _, rest), name in split if rest in wanted}


def _ratio(figure: Figure, is_time: bool) -> str:
    text = f"{figure.value:.2f}"
    return f"**{text}**" if (float(text) > 1 if is_time else float(text) < 1) else text


def all_figures(results: Results) -> dict[str, Figure]:
    return {name: figure for recorded in results.values() for name, figure in recorded.result.figures.items()}


def targets_table(results: Results, targets: Sequence[Target] = TARGETS) -> str:
    figures = all_figures(results)
    rows = []
    for target in targets:
        figure = figures.get(target.figure)
        sign = "<=" if target.better == "lower" else ">="
        limit = f"{sign} {target.limit:g}"
        if figure is None:
            missing = results[target.section].result.missing if target.section in results else {}
            rows.append([target.text, f"{', '.join(missing)} missing" if missing else "not measured", limit, "-"])
        else:
            is_met = "yes" if target.is_met(figure) else "**no**"
            rows.append([target.text, f"{figure.value:.3g} {figure.unit}", f"{limit} {figure.unit}", is_met])
    return table(["figure", "measured", "target", "met"], rows)


def machines(results: Results) -> str:
    """List each machine with the sections that it measured, each with its commit."""
    groups: dict[str, list[str]] = {}
    for name, recorded in results.items():
        kept = sorted({row["commit"][:12] for row in recorded.result.rows if "commit" in row})
        rows = f", some rows {', '.join(kept)}" if kept else ""
        commit = _commit(recorded.machine).removeprefix("commit ")
        groups.setdefault(f"{_machine(recorded.machine)}.", []).append(f"`{name}` ({commit}{rows})")
    return "\n".join(f"- {', '.join(names)}: {machine}" for machine, names in groups.items())


def _machine(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}, {versions}"


def _commit(facts: Mapping[str, Any]) -> str:
    commit = f"commit {facts['commit'][:12]}" if facts["commit"] else "unknown commit"
    if changed := facts.get("changed"):
        commit += f" with uncommitted changes in {len(changed)} {'file' if len(changed) == 1 else 'files'}"
    return commit


def section_table(section: str, recorded: Recorded | None) -> str:
    """Return the rows of a section as a table, its peers, and the command that measures it.

    Rows that differ only in their number of clients are joined, and long tables are thinned out.
    """
    command = f"`make bench BENCH={section}`"
    if recorded is None:
        return f"Not measured; {command} does it."
    result = recorded.result
    rows = _joined(result.rows) if result.rows and "clients" in result.rows[0] else list(result.rows)
    rows = rows[::-1][:: -(-len(rows) // MAX_ROWS)][::-1] if rows and "minutes" in rows[0] else rows
    columns = list(dict.fromkeys(name for row in rows for name in row))
    body = [[cell(row.get(name, "")) for name in columns] for row in rows]
    peers = [f"{name}: {build}." for name, build in result.peers.items()]
    peers += [f"{name} was not measured: {reason}." for name, reason in result.missing.items()]
    shown = f"{command}, {_commit(recorded.machine)}."
    return "\n\n".join([*_preliminary(recorded), table(columns, body), " ".join([*peers, shown])])


def _preliminary(recorded: Recorded) -> list[str]:
    """Return a note if the section was measured with fewer rounds than by default."""
    options = recorded.machine.get("options", {})
    if options.get("rounds", MIN_ROUNDS) >= MIN_ROUNDS:
        return []
    return [f"Preliminary, from {options['rounds']} rounds of {options['seconds']:g} s (`{recorded.command}`)."]


def _joined(rows: Sequence[Row]) -> list[Row]:
    """Join the rows of each load and server, with the values of all numbers of clients."""
    hidden = [] if any(sum(row.get("rejected", ())) for row in rows) else ["rejected"]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["load"], row["server"], row["settings"]), []).append(row)
    return [
        {
            "load": f"{load}, {_clients(several)}",
            "server": f"{server} ({settings})" if settings else server,
            **{
                name: "/".join(cell(row[name]) for row in several)
                for name in several[0]
                if name not in ("load", "server", "settings", "clients", *hidden)
            },
        }
        for (load, server, settings), several in groups.items()
    ]


def _clients(rows: Sequence[Row]) -> str:
    counts = [str(row["clients"]) for row in rows]
    return "1 client" if counts == ["1"] else f"{'/'.join(counts)} clients"


def cell(value: Any) -> str:
    """Format a value of a row: numbers with 3 digits, values of several rounds as their median."""
    if isinstance(value, (list, tuple)):
        return cell(statistics.median(value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(nested)}" for name, nested in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
