"""Curve of the losses of a run as SVG."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 720, 400  # pixels
LEFT, RIGHT, TOP, BOTTOM = 78, 100, 40, 55  # margins around the plot; names and last values are on the right
TEXT, GRID = "#1b1f24", "#d9dde2"
LINES = (("train_loss", "train", "#8a6d00"), ("validation_loss", "dev", "#105694"))
NUM_TICKS = 6  # at most, of an axis
MAX_CIRCLES = 40  # points of a line that are marked


def draw_curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a picture of the losses by epoch, given rows of the log, of which those without a
    validation lack `validation_loss`.
    """
    points = {field: [(row["epoch"], row[field]) for row in rows if row.get(field) is not None] for field, *_ in LINES}
    last = max(row["epoch"] for row in rows)
    losses = [loss for line in points.values() for _, loss in line]
    x_ticks = [tick for tick in _ticks(0, last) if tick == int(tick) and tick <= last]
    y_ticks = _ticks(min(losses), max(losses))
    x = _scale(0, last, LEFT, WIDTH - RIGHT)
    y = _scale(min(*losses, y_ticks[0]), max(*losses, y_ticks[-1]), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="13" fill="{TEXT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, "Loss by epoch; that of train is with dropout and label smoothing", "start"),
    ]
    for tick in y_ticks:
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick), GRID))
        parts.append(_text(LEFT - 8, y(tick) + 4.5, f"{tick:g}", "end"))
    for tick in x_ticks:
        parts.append(_line(x(tick), HEIGHT - BOTTOM, x(tick), HEIGHT - BOTTOM + 5, TEXT))
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 20, f"{tick:g}"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, TEXT))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "epoch"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(20 {middle:g}) rotate(-90)" text-anchor="middle">loss (nats)</text>')
    for index, (field, name, colour) in enumerate(line for line in LINES if points[line[0]]):
        places = " ".join(f"{x(epoch):.1f},{y(loss):.1f}" for epoch, loss in points[field])
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points[field]) <= MAX_CIRCLES:
            circles = ((x(epoch), y(loss)) for epoch, loss in points[field])
            parts += [f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>' for cx, cy in circles]
        value = f"{name} {points[field][-1][1]:.3g}"
        parts.append(_text(WIDTH - RIGHT + 8, TOP + 16 * (index + 1), value, "start", colour))
    return "\n".join([*parts, "</svg>\n"])


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers that cover a range, at most `NUM_TICKS`."""
    span = max(high - low, 0.05 * max(abs(low), abs(high), 1e-6))  # an axis with one value has a length
    low, high = (low + high - span) / 2, (low + high + span) / 2
    for factor in (1, 2, 5, 10, 20, 50, 100):
        step = factor * 10.0 ** (math.floor(math.log10(span)) - 1)
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < NUM_TICKS:
            break
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map of the range of an axis to pixels."""
    factor = (end - start) / (high - low) if high > low else 0.0
    return lambda value: start + (value - low) * factor


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
