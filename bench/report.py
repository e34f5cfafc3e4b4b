"""Format results as Markdown and write them into documents between marks."""

import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import Figure, Recorded, Row
from bench.targets import TARGETS, Target

END = "<!-- end of figures -->"
MAX_WIDTH = 100  # columns of prose in Markdown
Results = Mapping[str, Recorded]


def mark(part: str, writer: str = "make bench") -> str:
    return f"<!-- figures: {part}, written by `{writer}` -->"


def write_into(document: Path, part: str, text: str, writer: str = "make bench") -> None:
    """Replace the text between the marks of a part, with wrapped prose.

    Does nothing if the document lacks the marks.
    """
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
        lines += [one.replace("\0", " ") for one in wrapped]
    return "\n".join(lines)


def parts(results: Results) -> dict[str, str]:
    """Return the text of each part of the documents by its name."""
    return {
        "targets": targets_table(results),
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


def targets_table(results: Results, targets: Sequence[Target] = TARGETS) -> str:
    figures = all_figures(results)
    rows = []
    for target in targets:
        figure = figures.get(target.figure)
        sign = "<=" if target.better == "lower" else ">="
        if figure is None:
            rows.append([target.text, "not measured", f"{sign} {target.limit:g}", "-"])
        else:
            limit = f"{sign} {target.limit:g} {figure.unit}"
            rows.append([target.text, f"{figure.value:.3g} {figure.unit}", limit, _yes(target.is_met(figure))])
    return table(["figure", "measured", "target", "met"], rows)


def machines(results: Results) -> str:
    """List the machine and commit of each section; sections with the same ones share a line."""
    groups: dict[str, list[str]] = {}
    for name, recorded in results.items():
        commits = sorted({row["commit"] for row in recorded.result.rows if "commit" in row})
        kept = f" (some of its rows at {', '.join(commits)})" if commits else ""
        groups.setdefault(_machine(recorded.machine), []).append(f"`{name}`{kept}")
    return "\n".join(f"- {', '.join(names)}: {machine}" for machine, names in groups.items())


def _machine(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    commit = f"commit {facts['commit']}" if facts["commit"] else "unknown commit"
    if changed := facts.get("changed"):
        commit += f" with uncommitted changes in {len(changed)} {'file' if len(changed) == 1 else 'files'}"
    return f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}, {versions}, {commit}."


def _library(title: str, recorded: Recorded | None) -> str:
    """Return the table of tokens per second: a row for each contender, a column for each case."""
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
    return f"**{title}**\n\n{table(['load', 'server', 'requests/s', 'p50 ms', 'p99 ms', 'rejected'], body)}"


def _mixed(recorded: Recorded | None) -> str:
    if recorded is None:
        return "Not measured."
    body = [
        [row["load"], *(f"{row[what][part]:.1f}" for what in ("first_token_ms", "gap_ms") for part in ("p50", "p99"))]
        for row in recorded.result.rows
    ]
    encode = recorded.result.figures["mixed.encode"].value
    text = table(["streams", "first token p50 ms", "p99 ms", "between tokens p50 ms", "p99 ms"], body)
    return f"{text}\n\nOne encode of the token budget, requested alone, takes {encode:.0f} ms."


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
    return f"{shell(recorded.command)}\n\n{table([*head, 'tokens/s', 'whole', 'cut off', 'failed'], body)}"


def _cases(rows: Sequence[Row], *columns: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[column] for column in columns) for row in rows))


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def shell(command: str) -> str:
    """Format a command as a code block."""
    return f"```sh\n{command}\n```"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
