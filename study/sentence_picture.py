"""The maps of one sentence, all systems in one picture; the SVG is written by hand, which keeps it small."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from bench.record import Result, Row
from model.config import RecurrentConfig
from model.systems import SYSTEMS, bundle_name

# Pixels.
COLUMNS, PANEL, MARGIN = 3, 330, 14
LABELS, MAP = 66, 246  # widths: of a row's label, of a map
CELL = 16  # height
HEAD, FOOT = 110, 66  # above and below a map
LINE = 13  # height of a line of a panel's head
PICTURE_HEAD, PICTURE_FOOT = 44, 84
ROWS_WITHOUT_MAP = 5  # as high as so many
LETTERS = 64  # of such a line
VOCABULARY = 6000  # any
SLOT_STEP = 4  # every so many slots have their number

POSITIVE, NEGATIVE, ZERO = "#0b3c6f", "#b5480b", "#dedede"
GAMMA = 0.65  # small weights are to be seen too
NUMBERED = 9.5  # percent; from here on a weight stands in its cell as a number too
LIGHT_TEXT = 40  # percent; from here on that number is white
KINDS = {
    "cross": "cross-attention",
    "encoder": "encoder's self-attention",
    "encoder_slots": "encoder's attention to slots, which are mixtures of the source",
    None: "no attention",
}
NOTES = (
    "A row for each token that is written (of an encoder: read), a column for each token that is looked at.",
    "Numbers are percent. Grey is exactly 0: the model cannot look there, or the weight is less than float32 holds. "
    "A dot before a piece: it goes on with the word before it.",
)

Matrix = NDArray[np.float64]


def draw_sentence(result: Result, folder: Path) -> None:
    """Write `one-sentence.svg`."""
    (folder / "one-sentence.svg").write_text(picture(result.rows), encoding="utf-8")


def picture(rows: Sequence[Row]) -> str:
    """The SVG of the rows of the step `sentence`, recurrent systems before Transformers and other models last."""
    places = {name: place for place, name in enumerate(_order())}
    panels = sorted(rows, key=lambda row: places.get(row["model"], len(places)))
    lines = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    parts, top = [], PICTURE_HEAD
    for line in lines:
        for column, row in enumerate(line):
            parts.append(f'<g transform="translate({MARGIN + column * PANEL} {top})">{_panel(row)}</g>')
        top += HEAD + FOOT + CELL * max(map(_height, line))
    width, height = 2 * MARGIN + COLUMNS * PANEL, top + PICTURE_FOOT
    title = _text(width / 2, 26, f"“{panels[0]['sentence']}”", 'text-anchor="middle" font-size="17"')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="9.5">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            title,
            *parts,
            f'<g transform="translate({MARGIN} {top})">{_legend(width - 2 * MARGIN)}</g>',
            "</svg>\n",
        ]
    )


def _order() -> list[str]:
    """Bundles of all systems, recurrent ones before Transformers."""
    systems = sorted(SYSTEMS, key=lambda name: not isinstance(SYSTEMS[name].make_config(VOCABULARY), RecurrentConfig))
    return [bundle_name(name) for name in systems]


def shown(tokens: Sequence[str]) -> list[str]:
    """Pieces as labels: one that begins a word stands as it is, one that goes on with it has a dot before it."""
    return [f"·{token}" if token[:1].isalnum() else token.removeprefix(" ") for token in tokens]


def remarks(row: Row) -> str:
    """What a map is, and what is particular to it."""
    if row["kind"] is None:
        return KINDS[None]
    said = [KINDS[row["kind"]]]
    if row["kind"] == "encoder" and not row["normalized"]:
        said = ["encoder's attention to slots, pulled back to tokens"]
    if row["layers"] > 1:
        said.append(f"mean of {row['layers']} layers" + (f" × {row['heads']} heads" if row["heads"] > 1 else ""))
    weights: Matrix = np.array(row["map"])
    if np.isin(weights, (0, 1)).all():
        said.append("one-hot")
    if not row["normalized"]:
        sums = weights.sum(axis=1)
        what = "sum to less than 1" if sums.max() < 1 else "do not sum to 1"
        said.append(f"rows {what} ({sums.min():.2f} to {sums.max():.2f})")
    if (weights < 0).any() and "largest" in row:  # rows that were kept may have none
        said.append(f"signs cancel: single heads reach {row['largest']:.2f}")
    return "; ".join(said)


def _height(row: Row) -> int:
    return len(row["map"]) if row["kind"] else ROWS_WITHOUT_MAP


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{" " + style if style else ""}>{escape(text)}</text>'


def _panel(row: Row) -> str:
    head = [_text(0, 12, row["model"], 'font-size="12" font-weight="bold"')]
    for text, style, lines in (
        (row["description"], 'fill="#555"', 2),
        (f"“{row['text']}”", 'font-style="italic"', 2),
        (remarks(row), 'fill="#a03000"', 3),
    ):
        for line in textwrap.wrap(text, LETTERS, max_lines=lines, placeholder=" …"):
            head.append(_text(0, 13 + LINE * len(head), line, style))
    below = _no_map() if row["kind"] is None else _map(row)
    return "".join([*head, f'<g transform="translate({LABELS} {HEAD})">{below}</g>'])


def _no_map() -> str:
    """What stands where there is no attention to be seen."""
    height = ROWS_WITHOUT_MAP * CELL
    style = 'fill="none" stroke="#888" stroke-dasharray="4 3"'
    text = _text(MAP / 2, height / 2 + 3, "the whole source, in one vector", 'text-anchor="middle" fill="#555"')
    return f'<rect width="{MAP}" height="{height}" {style}/>{text}'


def _map(row: Row) -> str:
    weights: Matrix = np.array(row["map"])
    width = MAP / weights.shape[1]
    sources = shown(row["source_tokens"])
    names = shown(row["target_tokens"]) if row["kind"] == "cross" else sources
    bottom = len(weights) * CELL
    if row["kind"] == "encoder_slots":
        places = range(0, weights.shape[1], SLOT_STEP)
        below = [_text((place + 0.5) * width, bottom + 12, str(place), 'text-anchor="middle"') for place in places]
    else:
        turned = [
            f"translate({(place + 0.5) * width + 3:.1f} {bottom + 5}) rotate(-90)" for place in range(len(sources))
        ]
        below = [f'<text transform="{turn}">{escape(name)}</text>' for turn, name in zip(turned, sources, strict=True)]
    beside = "".join(_text(-4, (place + 0.72) * CELL, name) for place, name in enumerate(names))
    return "".join(
        [
            f'<g transform="scale({width:.4f} {CELL})">{"".join(_cells(np.rint(100 * weights), weights == 0))}</g>',
            f'<g font-size="8" text-anchor="middle">{"".join(_numbers(np.rint(100 * weights), width))}</g>',
            f'<rect width="{MAP}" height="{bottom}" fill="none" stroke="#888" stroke-width=".6"/>',
            f'<g text-anchor="end">{beside}</g>',
            f'<g text-anchor="{"middle" if row["kind"] == "encoder_slots" else "end"}">{"".join(below)}</g>',
        ]
    )


def _cells(percents: Matrix, are_zero: NDArray[np.bool_]) -> Iterator[str]:
    """One path a colour, in units of cells."""
    squares: dict[tuple[str, float], list[str]] = defaultdict(list)
    for (row, column), percent in np.ndenumerate(percents):
        if are_zero[row, column]:
            colour, opacity = ZERO, 1.0
        else:
            colour, opacity = POSITIVE if percent > 0 else NEGATIVE, min(abs(percent) / 100, 1.0) ** GAMMA
        if opacity > 0:
            squares[colour, opacity].append(f"M{column + 0.03:g} {row + 0.03:g}h.94v.94h-.94z")
    for (colour, opacity), path in squares.items():
        yield f'<path fill="{colour}" fill-opacity="{opacity:.2f}" d="{"".join(path)}"/>'


def _numbers(percents: Matrix, width: float) -> Iterator[str]:
    for (row, column), percent in np.ndenumerate(percents):
        if abs(percent) > NUMBERED and width > CELL / 2:
            style = 'fill="white"' if abs(percent) > LIGHT_TEXT else ""
            yield _text(round((column + 0.5) * width, 1), round((row + 0.68) * CELL, 1), f"{percent:.0f}", style)


def _legend(width: float) -> str:
    steps = [-1.0, -0.8, -0.6, -0.4, -0.2, 0.0, 0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0]
    scale = 100 * np.array([steps])
    size = len(steps) * 28
    cells = "".join(_cells(scale, scale == 0))
    numbers = "".join(
        _text((place + 0.5) * 28, 30, f"{step:g}", 'text-anchor="middle"') for place, step in enumerate(scale[0])
    )
    notes = "".join(_text(width / 2, 52 + 15 * place, note, 'text-anchor="middle"') for place, note in enumerate(NOTES))
    left = (width - size) / 2
    return f'<g transform="translate({left} 0)"><g transform="scale(28 18)">{cells}</g>{numbers}</g>{notes}'
