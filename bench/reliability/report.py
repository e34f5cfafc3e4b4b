"""Format the tables of docs/explanation/reliability.md."""

from collections.abc import Mapping

from bench.record import Recorded
from bench.report import machines, shell, table, targets_table
from bench.targets import Target

WRITER = "python -m bench.reliability"
TARGETS = (
    Target("overload.large.3", "goodput at 3 times as many large calls over the best", "higher", 0.9),
    Target("overload.large.10", "goodput at 10 times as many large calls over the best", "higher", 0.9),
    Target("overload.single.3", "goodput at 3 times as many single inputs over the best", "higher", 0.9),
    Target("overload.single.10", "goodput at 10 times as many single inputs over the best", "higher", 0.9),
    Target("overload.small.success", "single inputs that succeed beside 12 clients with large calls", "higher", 95),
    Target("overload.small.p99", "p99 of these single inputs over that without large calls", "lower", 5),
    Target("overload.health.Retry-After", "p99 of /health/live, 600 clients that wait for Retry-After", "lower", 100),
    Target("overload.health.at once", "p99 of /health/live, 600 clients that retry at once", "lower", 100),
    Target("responses.survived", "200 clients with responses of 11 MB in 1 GiB: the process survives (1)", "higher", 1),
    Target("responses.normal", "single inputs that succeed beside them", "higher", 95),
)


def parts(results: Mapping[str, Recorded]) -> dict[str, str]:
    """Return the tables by the names of their marks in the page."""
    return {
        "targets": targets_table(results, TARGETS),
        "machines": machines(results),
        **{name: _rows(recorded) for name, recorded in results.items()},
    }


def _rows(recorded: Recorded) -> str:
    """Return the table of a section: a row for each load, with all columns that its rows have."""
    columns = list(dict.fromkeys(name for row in recorded.result.rows for name in row if name != "load"))
    body = [[str(row["load"]), *(str(row.get(name, "")) for name in columns)] for row in recorded.result.rows]
    return f"{shell(recorded.command)}\n\n{table(['load', *(name.replace('_', ' ') for name in columns)], body)}"
