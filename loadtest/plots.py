"""Line plots as SVG for the HTML report.

The colours of lines and text come from the style sheet of the page, so that the plots suit its
light and its dark theme. Each line also has its own dashes and markers, so that the lines can be
told apart without colours.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 300  # pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 46  # margins around the axes
LEGEND_HEIGHT = 26
DASHES = ("", "7 4", "2 3", "9 3 2 3")
MAX_MARKERS = 40  # points of a line; lines with more have no markers
CHARACTER_WIDTH = 6.9  # pixels of a label, on average


@dataclass(frozen=True)
class Line:
    """Line of a plot with its label; points with None are gaps."""

    label: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class _Axis:
    """Scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    @classmethod
    def of(cls, values: Iterable[float], start: float, end: float, is_log: bool) -> "_Axis":
        drawable = [value for value in values if value > 0 or not is_log]
        low, high = min(drawable, default=1.0), max(drawable, default=1.0)
        if is_log:
            low, high = low / 1.1, high * 1.1
        else:
            low, high = 0.0, high or 1.0
        return cls(low, high, start, end, is_log)

    def place(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values in the range of the axis: 1, 2 or 5 times powers of ten."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < 1000 else (1,)
            values = [step * 10.0**decade for decade in decades for step in steps]
            return [value for value in values if self.low <= value <= self.high]
        step = round_up(0.999 * (self.high - self.low) / 5)
        return [step * index for index in range(int(self.high / step + 1e-9) + 1)]


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def line_plot(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], *, log_x: bool = False, log_y: bool = False
) -> str:
    """Return an SVG element with lines, a legend and axes, from 0 unless they are logarithmic."""
    top = TOP + LEGEND_HEIGHT
    x = _Axis.of((point[0] for line in lines for point in line.points), LEFT, WIDTH - RIGHT, log_x)
    heights = [height for line in lines for _, height in line.points if height is not None]
    y = _Axis.of(heights, HEIGHT - BOTTOM, top, log_y)
    parts = [*_legend([line.label for line in lines]), *_axes(x, y, top, x_label, y_label)]
    for index, line in enumerate(lines):
        parts += _curve(line, x, y, index)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _legend(labels: Sequence[str]) -> Iterable[str]:
    left = float(LEFT)
    for index, label in enumerate(labels):
        yield _path(f"M{left:g} {TOP + 4}h30", index)
        yield _marker(left + 15, TOP + 4, index, "")
        yield _text(left + 38, TOP + 8, label, "start")
        left += 58 + CHARACTER_WIDTH * len(label)


def _axes(x: _Axis, y: _Axis, top: float, x_label: str, y_label: str) -> Iterable[str]:
    for value in y.ticks():
        height = y.place(value)
        yield f'<path class="grid" d="M{x.start:g} {height:.1f}H{x.end:g}"/>'
        yield _text(x.start - 8, height + 4, f"{value:,.10g}", "end")
    for value in x.ticks():
        left = x.place(value)
        yield f'<path class="axis" d="M{left:.1f} {y.start:g}v4"/>'
        yield _text(left, y.start + 18, f"{value:,.10g}", "middle")
    yield f'<path class="axis" d="M{x.start:g} {y.start:g}H{x.end:g}"/>'
    yield _text((x.start + x.end) / 2, HEIGHT - 8, x_label, "middle")
    middle = (top + y.start) / 2
    yield f'<text text-anchor="middle" transform="translate(14 {middle:g}) rotate(-90)">{escape(y_label)}</text>'


def _curve(line: Line, x: _Axis, y: _Axis, index: int) -> Iterable[str]:
    commands, command = [], "M"
    for value, height in line.points:
        if height is None:
            command = "M"
            continue
        commands.append(f"{command}{x.place(value):.1f} {y.place(height):.1f}")
        command = "L"
    yield _path("".join(commands), index)
    if len(line.points) <= MAX_MARKERS:
        for value, height in line.points:
            if height is not None:
                text = f"{line.label}: {height:,.4g} at {value:,.4g}"
                yield _marker(x.place(value), y.place(height), index, text)


def _path(commands: str, index: int) -> str:
    return f'<path class="line line{index}" stroke-dasharray="{DASHES[index]}" d="{commands}"/>'


def _marker(left: float, top: float, index: int, text: str) -> str:
    """Return a circle, square, triangle or diamond; `text` appears below the pointer."""
    shapes = ("m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "m-4-4h8v8h-8z", "m0-5l5 8h-10z", "m0-5l5 5l-5 5l-5-5z")
    title = f"<title>{escape(text)}</title>" if text else ""
    return f'<path class="marker{index}" d="M{left:.1f} {top:.1f}{shapes[index]}">{title}</path>'


def _text(left: float, top: float, text: str, anchor: str) -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
