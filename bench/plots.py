"""Plots of the results as small SVG files that are reproducible byte for byte."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.record import Figure, Recorded
from bench.targets import TARGETS

STYLE: Any = {"svg.hashsalt": "sightline", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False}
LIBRARIES = {"library-base": "base-random", "library-tiny": "tiny"}
SERVERS = {"server-base": "6 + 6 layers, d 512", "server-tiny": "shipped model"}
RATIOS = {  # legend: decoding, data types, colour
    "best types, greedy": ("greedy", "best", "#1d4e89"),
    "best types, beam 5": ("beam 5", "best", "#7fb2e5"),
    "float32, greedy": ("greedy", "float32", "#d17b0f"),
    "float32, beam 5": ("beam 5", "float32", "#f2c57c"),
}
SERVER_COLOURS = {"sightline": "#1d4e89", "litserve": "#d17b0f", "fastapi": "#9a9a9a"}
LIMITS = {target.figure: target.limit for target in TARGETS}

Results = Mapping[str, Recorded]


def draw(results: Results, folder: Path) -> None:
    """Write `library.svg` and `servers.svg` if their results exist."""
    with mpl.rc_context({**STYLE, "backend": "svg"}):
        if libraries := [name for name in LIBRARIES if name in results]:
            figure, axes = pyplot.subplots(1, len(libraries), figsize=(4.5 * len(libraries), 3), squeeze=False)
            for name, axis in zip(libraries, axes[0], strict=True):
                _draw_ratios(axis, LIBRARIES[name], results[name].result.figures)
            save(figure, folder / "library.svg")
        panels = [
            (name, decoding, _with_decoding(results[name].result.rows, decoding))
            for name in SERVERS
            if name in results
            for decoding in ("greedy", "beam 5")
        ]
        if panels:
            figure, axes = pyplot.subplots(2, len(panels), figsize=(3 * len(panels), 4.5), squeeze=False)
            for column, (name, decoding, rows) in enumerate(panels):
                axes[0, column].set_title(f"{SERVERS[name]}, {decoding}")
                _draw_servers(axes[0, column], rows, "client", "requests_per_s", "requests/s")
                _draw_servers(axes[1, column], rows, "open", "p99_ms", "p99 ms")
                axes[1, column].set_yscale("log")
            axes[0, 0].legend(frameon=False, fontsize=6)
            save(figure, folder / "servers.svg")


def _draw_ratios(axis: Axes, subject: str, figures: Mapping[str, Figure]) -> None:
    """Draw Sightline's speed relative to CTranslate2: black lines are targets, the dotted line is
    equal speed.
    """
    prefix = f"library.{subject}.greedy."
    rows = sorted({int(name.removeprefix(prefix).split(".")[0]) for name in figures if name.startswith(prefix)})
    width = 0.8 / len(RATIOS)
    for index, (label, (decoding, types, colour)) in enumerate(RATIOS.items()):
        names = [f"library.{subject}.{decoding}.{count}.{types}" for count in rows]
        left = [group + (index - len(RATIOS) / 2) * width for group in range(len(rows))]
        bars = axis.bar(left, [figures[name].value for name in names], width, align="edge", color=colour, label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize=6)
        for start, name in zip(left, names, strict=True):
            if name in LIMITS:
                axis.hlines(LIMITS[name], start, start + width, colors="black", linewidth=1.5)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(rows)), [str(count) for count in rows])
    axis.set_xlabel("sentences at once")
    axis.set_ylabel("times as fast as CTranslate2")
    axis.set_title({"base-random": "6 + 6 layers, d 512", "tiny": "shipped model"}[subject])
    axis.legend(frameon=False, fontsize=6)


def _with_decoding(rows: Sequence[Mapping[str, Any]], decoding: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["decoding"] == decoding]


def _draw_servers(axis: Axes, rows: Sequence[Mapping[str, Any]], kind: str, column: str, label: str) -> None:
    """Draw a group for each load whose name contains `kind`, with one bar for each server."""
    rows = [row for row in rows if kind in row["load"]]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    width = 0.8 / len(SERVER_COLOURS)
    for index, (server, colour) in enumerate(SERVER_COLOURS.items()):
        values = [statistics.median(row[column]) for row in rows if row["server"] == server]
        left = [group + (index - len(SERVER_COLOURS) / 2) * width for group in range(len(loads))]
        axis.bar(left, values, width, align="edge", color=colour, label=server)
    axis.set_xticks(range(len(loads)), loads)
    axis.set_ylabel(label)


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG without a date, so that equal figures give equal bytes."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
