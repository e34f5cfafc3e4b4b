"""Tables of docs/reliability.md."""

from collections.abc import Mapping

from bench.bars import Bar
from bench.record import Recorded
from bench.report import bars_table, machines, table

WRITER = "python -m bench.reliability"

TARGETS = (
    Bar("overload.large.3", "goodput at 3 times as many large calls over the best", "higher", 0.9),
    Bar("overload.large.10", "goodput at 10 times as many large calls over the best", "higher", 0.9),
    Bar("overload.single.3", "goodput at 3 times as many single inputs over the best", "higher", 0.9),
    Bar("overload.single.10", "goodput at 10 times as many single inputs over the best", "higher", 0.9),
    Bar("overload.small.success", "single inputs answered beside 12 clients with large calls", "higher", 95),
    Bar("overload.small.p99", "their p99 over the one alone", "lower", 5),
    Bar("overload.health.Retry-After", "p99 of /health/live, 600 clients that wait for Retry-After", "lower", 100),
    Bar("overload.health.at once", "p99 of /health/live, 600 clients that retry at once", "lower", 100),
    Bar("responses.survived", "200 clients with responses of 11 MB in 1 GiB: the process survives (1)", "higher", 1),
    Bar("responses.normal", "single inputs answered beside them", "higher", 95),
)


def parts(results: Mapping[str, Recorded]) -> dict[str, str]:
    """Return the tables by the names of their places in the page."""
    return {
        "targets": bars_table(results, TARGETS),
        "machines": machines(results),
        **{name: _rows(recorded) for name, recorded in results.items()},
    }


def _rows(recorded: Recorded) -> str:
    """One line for each load, with the columns that it has."""
    columns = list(dict.fromkeys(name for row in recorded.result.rows for name in row if name != "load"))
    body = [[str(row["load"]), *(str(row.get(name, "")) for name in columns)] for row in recorded.result.rows]
    return f"`{recorded.command}`\n\n{table(['load', *(name.replace('_', ' ') for name in columns)], body)}"
