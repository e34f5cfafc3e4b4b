"""Plots of the results: Sightline against other libraries, and against other servers."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from bench.record import Figure, Recorded, Row
from bench.style import (
    BLACK,
    BLUE,
    GREEN,
    LIGHT_BLUE,
    LIGHT_ORANGE,
    ORANGE,
    WIDTH,
    describe,
    save,
    style,
    use_log_scale,
)
from bench.targets import TARGETS

MODELS = {"base": "6 + 6 layers, width 512", "tiny": "shipped model"}
LIBRARIES = {"library-base": ("base-random", "base"), "library-tiny": ("tiny", "tiny")}
SERVERS = {"server-base": "base", "server-tiny": "tiny"}
DECODINGS = {"greedy": "greedy decoding", "beam 5": "beam search, 5 beams"}
RATIOS = {  # legend: decoding, data types, colour
    "fastest data types, greedy": ("greedy", "best", BLUE),
    "fastest data types, 5 beams": ("beam 5", "best", LIGHT_BLUE),
    "float32, greedy": ("greedy", "float32", ORANGE),
    "float32, 5 beams": ("beam 5", "float32", LIGHT_ORANGE),
}
SERVER_STYLES = {"sightline": (BLUE, "o"), "litserve": (ORANGE, "s"), "fastapi": (GREEN, "^")}  # colour, marker
LIMITS = {target.figure: target.limit for target in TARGETS}

Results = Mapping[str, Recorded]


def draw(results: Results, folder: Path) -> None:
    """Write `library.svg` and `servers.svg` if their results exist."""
    with style():
        if libraries := [name for name in LIBRARIES if name in results]:
            _draw_libraries(results, libraries, folder / "library.svg")
        if servers := [name for name in SERVERS if name in results]:
            _draw_servers(results, servers, folder / "servers.svg")


def _draw_libraries(results: Results, names: Sequence[str], path: Path) -> None:
    height = 0.9 + 2.4 * len(names)
    figure, grid = pyplot.subplots(len(names), 1, figsize=(WIDTH, height), squeeze=False)
    for name, axes in zip(names, grid[:, 0], strict=True):
        subject, model = LIBRARIES[name]
        _draw_ratios(axes, subject, results[name].result.figures)
        axes.set_title(MODELS[model][0].upper() + MODELS[model][1:])
    describe(
        figure,
        "Speed of Sightline as a multiple of CTranslate2's",
        "Black lines across bars are targets. The dotted line is equal speed. "
        "Fastest data types: the fastest of each library.",
        legend=[Patch(color=colour, label=label) for label, (*_, colour) in RATIOS.items()],
    )
    save(figure, path)


def _draw_ratios(axes: Axes, subject: str, figures: Mapping[str, Figure]) -> None:
    prefix = f"library.{subject}.greedy."
    rows = sorted({int(name.removeprefix(prefix).split(".")[0]) for name in figures if name.startswith(prefix)})
    width = 0.88 / len(RATIOS)
    for index, (decoding, types, colour) in enumerate(RATIOS.values()):
        names = [f"library.{subject}.{decoding}.{count}.{types}" for count in rows]
        left = [group + (index - len(RATIOS) / 2) * width for group in range(len(rows))]
        values = [figures[name].value for name in names]
        axes.bar(left, values, 0.94 * width, align="edge", color=colour)
        for start, name, value in zip(left, names, values, strict=True):
            # At the foot of the bar, where neither its top nor a target is.
            axes.annotate(
                f"{value:.1f}",
                (start + width / 2, 0),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                color="white" if colour in (BLUE, ORANGE) else BLACK,
            )
            if name in LIMITS:
                axes.hlines(LIMITS[name], start, start + 0.94 * width, colors=BLACK, linewidth=2)
    axes.axhline(1, color=BLACK, linewidth=1, linestyle=":")
    axes.grid(visible=False, axis="x")
    axes.set_xticks(range(len(rows)), [str(count) for count in rows])
    axes.set_xlabel("sentences submitted at once")
    axes.set_ylabel("times as fast")


def _draw_servers(results: Results, names: Sequence[str], path: Path) -> None:
    panels = [(name, decoding) for name in names for decoding in DECODINGS]
    figure, grid = pyplot.subplots(len(panels), 2, figsize=(WIDTH, 1.1 + 2 * len(panels)), squeeze=False)
    for (name, decoding), (left, right) in zip(panels, grid, strict=True):
        rows = [row for row in results[name].result.rows if row["decoding"] == decoding]
        _draw_throughput(left, [row for row in rows if "client" in row["load"]])
        _draw_latency(right, [row for row in rows if "open" in row["load"]])
        title = f"{MODELS[SERVERS[name]]}, {DECODINGS[decoding]}"
        left.set_title(title[0].upper() + title[1:])
        left.set_ylabel("requests/s")
        right.set_ylabel("p99 latency, ms")
    grid[-1, 0].set_xlabel("concurrent clients (more requests/s is better)")
    grid[-1, 1].set_xlabel("arrival rate (less latency is better; logarithmic)")
    describe(
        figure,
        "Throughput and latency of three servers",
        "Medians; lines at points span all rounds. Arrival rates are percentages of the throughput of the slowest\n"
        "server under the largest number of clients. litserve and fastapi run CTranslate2.",
        legend=grid[0, 1].get_legend_handles_labels()[0],
        columns=len(SERVER_STYLES),
    )
    save(figure, path)


def _draw_throughput(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a group for each number of clients, with one bar for each server."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    width = 0.84 / len(SERVER_STYLES)
    for index, (server, (colour, _)) in enumerate(SERVER_STYLES.items()):
        values = [statistics.median(row["requests_per_s"]) for row in rows if row["server"] == server]
        left = [group + (index - len(SERVER_STYLES) / 2) * width for group in range(len(loads))]
        bars = axes.bar(left, values, 0.92 * width, align="edge", color=colour, label=server)
        axes.bar_label(bars, fmt="%.0f", padding=1, fontsize=7)
    axes.margins(y=0.15)  # for the numbers of the highest bars
    axes.grid(visible=False, axis="x")
    axes.set_xticks(range(len(loads)), loads)


def _draw_latency(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a group for each arrival rate, with one point for each server."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    use_log_scale(axes, "y")
    for index, (server, (colour, marker)) in enumerate(SERVER_STYLES.items()):
        rounds = [row["p99_ms"] for row in rows if row["server"] == server]
        medians = [statistics.median(one) for one in rounds]
        ends = [
            [median - min(one) for median, one in zip(medians, rounds, strict=True)],
            [max(one) - median for median, one in zip(medians, rounds, strict=True)],
        ]
        x = [group + 0.16 * (index - (len(SERVER_STYLES) - 1) / 2) for group in range(len(loads))]
        axes.errorbar(x, medians, ends, color=colour, marker=marker, linestyle="none", label=server)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(loads) - 0.5)
    axes.set_xticks(range(len(loads)), [load.removeprefix("open ") for load in loads])
