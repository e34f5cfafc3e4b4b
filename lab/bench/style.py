"""The style of all plots: colours, fonts, and direct labels of lines.

Equal figures give equal SVG files, byte for byte. Figures are as wide as a text column of about 700
pixels, so that their text is at least 9 pixels high on a page. The colours are those of Okabe and
Ito (2008), which colour-blind readers can tell apart. Every series also has its own marker, line
style or position.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

WIDTH = 7.2  # inches; 691 CSS pixels

BLUE, ORANGE, GREEN, BLACK, GREY = "#0072b2", "#d55e00", "#009e73", "#222222", "#666666"
LIGHT_BLUE, LIGHT_ORANGE = "#8cc4e6", "#f5b583"

_RC_PARAMS: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "backend": "svg",
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.06,
    "font.size": 8,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "sightline",
}

_NAME = re.compile(r"\b[pm][0-9a-f]{10}\b")  # of a clipping path or a marker
_COORDINATE = re.compile(r"-?\d+\.\d{4,}")
_BIAS = 1e-7  # coordinates are often halves of the last decimal, which would be rounded up or down

MAX_TICKS = 20
MIN_LABEL_DISTANCE = 10.5  # points
LABEL_X = 1.02  # left end of the labels, as a fraction of the width of the axes


@dataclass(frozen=True)
class LineLabel:
    """Label at the right end of a line, which is at (x, y) in data coordinates."""

    text: str
    x: float
    y: float
    colour: str


def style() -> Any:
    """Return a context in which figures are drawn in this style."""
    return mpl.rc_context(_RC_PARAMS)


def describe(figure: Any, title: str, note: str, legend: Sequence[Any] = (), columns: int = 2) -> None:
    """Add a title, a legend below the title, and a note at the bottom that explains the marks."""
    figure.legend(
        handles=legend,
        loc="outside upper left",
        ncols=columns,
        handlelength=3,
        title=title,
        title_fontproperties={"size": 10, "weight": "bold"},
        alignment="left",
        borderpad=0,
    )
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color=GREY)


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG whose bytes are the same on all processors.

    The SVG has no date, coordinates have three decimals, and the names of elements do not depend on
    the last bits of coordinates, as they do in matplotlib.
    """
    written = io.StringIO()
    figure.savefig(written, metadata={"Date": None})
    pyplot.close(figure)
    names: dict[str, str] = {}
    text = _NAME.sub(lambda match: names.setdefault(match[0], f"{match[0][0]}{len(names)}"), written.getvalue())
    path.write_text(_COORDINATE.sub(lambda match: f"{float(match[0]) + _BIAS:.3f}", text), encoding="utf-8")


def format_number(value: float, _position: int | None = None) -> str:
    """Format the number of a tick: 0.5, 1, 1,000."""
    return f"{value:,.10g}"


def use_log_scale(axes: Axes, name: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with ordinary numbers at 1, 2 and 5 times each power of ten."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=MAX_TICKS))
    axis.set_major_formatter(FuncFormatter(format_number))
    axis.set_minor_locator(NullLocator())


def label_lines(axes: Axes, labels: Sequence[LineLabel]) -> None:
    """Write labels to the right of the ends of lines, far enough apart to be read, and connected
    with them by thin lines. Call this when the limits, scales and texts of the figure are final.
    """
    figure: Any = axes.figure
    figure.draw_without_rendering()  # computes the layout, and with it the distances of the ends
    ordered = sorted(labels, key=lambda label: label.y)
    ends = axes.transData.transform([(label.x, label.y) for label in ordered]) * 72 / figure.dpi  # points
    heights = spread(ends[:, 1].tolist(), MIN_LABEL_DISTANCE)
    for label, (_, y), height in zip(ordered, ends, heights, strict=True):
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(LABEL_X, height - y),
            textcoords=("axes fraction", "offset points"),
            color=label.colour,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def spread(values: Sequence[float], distance: float) -> list[float]:
    """Move increasing values so that neighbours are at least `distance` apart. The sum of the
    squared moves is minimal: this is isotonic regression of `values[i] - i * distance` by pooling
    adjacent violators.
    """
    pools: list[list[float]] = []
    for index, value in enumerate(values):
        pools.append([value - index * distance])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    flat = [mean(pool) for pool in pools for _ in pool]
    return [value + index * distance for index, value in enumerate(flat)]
