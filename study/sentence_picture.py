"""The attention maps of one sentence by all systems, as one SVG that is written directly to keep it
small.
"""

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
LABELS, MAP = 66, 246  # widths of a row's label and of a map
CELL = 16  # height
HEAD, FOOT = 110, 66  # heights above and below a map
LINE = 13  # height of a line of text above a map
PICTURE_HEAD, PICTURE_FOOT = 44, 84
ROWS_WITHOUT_MAP = 5  # height, in rows, of a panel without a map
LETTERS = 64  # maximum length of a line of text above a map
VOCABULARY = 6000  # any size
SLOT_STEP = 4  # distance between numbered projected keys

POSITIVE, NEGATIVE, ZERO = "#0b3c6f", "#b5480b", "#dedede"
GAMMA = 0.65  # below 1, so that small weights are visible
NUMBERED = 9.5  # percent; larger weights are also printed as numbers
LIGHT_TEXT = 40  # percent; the numbers of larger weights are white
KINDS = {
    "cross": "cross-attention",
    "encoder": "encoder's self-attention",
    "encoder_slots": "encoder's attention to projected keys, which are mixtures of the source",
    None: "no attention",
}
NOTES = (
    "Rows are output tokens (for an encoder: source tokens), columns are the tokens that they attend to.",
    "Numbers are percent. Grey is exactly 0: the position is masked, or the weight underflows float32. "
    "A piece with a leading dot continues the word before it.",
)

Matrix = NDArray[np.float64]


def draw_sentence(result: Result, folder: Path) -> None:
    """Write `one-sentence.svg`."""
    (folder / "one-sentence.svg").write_text(picture(result.rows), encoding="utf-8")


def picture(rows: Sequence[Row]) -> str:
    """Return the SVG of the rows of the step `sentence`: recurrent systems first, then
    Transformers, then others.
    """
    ranks = {name: index for index, name in enumerate(_order())}
    panels = sorted(rows, key=lambda row: ranks.get(row["model"], len(ranks)))
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
    """Return the names of all systems' bundles, recurrent ones before Transformers."""
    systems = sorted(SYSTEMS, key=lambda name: not isinstance(SYSTEMS[name].make_config(VOCABULARY), RecurrentConfig))
    return [bundle_name(name) for name in systems]


def token_labels(tokens: Sequence[str]) -> list[str]:
    """Return labels of tokens: pieces that continue a word get a leading dot."""
    return [f"·{token}" if token[:1].isalnum() else token.removeprefix(" ") for token in tokens]


def remarks(row: Row) -> str:
    """Describe the kind of a map and its peculiarities."""
    if row["kind"] is None:
        return KINDS[None]
    notes = [KINDS[row["kind"]]]
    if row["kind"] == "encoder" and not row["normalized"]:
        notes = ["encoder's attention to projected keys, mapped back to tokens"]
    if row["layers"] > 1:
        notes.append(f"mean of {row['layers']} layers" + (f" × {row['heads']} heads" if row["heads"] > 1 else ""))
    weights: Matrix = np.array(row["map"])
    if np.isin(weights, (0, 1)).all():
        notes.append("one-hot")
    if not row["normalized"]:
        sums = weights.sum(axis=1)
        sums_to = "sum to less than 1" if sums.max() < 1 else "do not sum to 1"
        notes.append(f"rows {sums_to} ({sums.min():.2f} to {sums.max():.2f})")
    if (weights < 0).any() and "largest" in row:  # rows kept from an earlier result may lack it
        notes.append(f"signs cancel: single heads reach {row['largest']:.2f}")
    return "; ".join(notes)


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
    """Return the placeholder for a model without attention."""
    height = ROWS_WITHOUT_MAP * CELL
    style = 'fill="none" stroke="#888" stroke-dasharray="4 3"'
    text = _text(MAP / 2, height / 2 + 3, "the whole source, in one vector", 'text-anchor="middle" fill="#555"')
    return f'<rect width="{MAP}" height="{height}" {style}/>{text}'


def _map(row: Row) -> str:
    weights: Matrix = np.array(row["map"])
    width = MAP / weights.shape[1]
    sources = token_labels(row["source_tokens"])
    names = token_labels(row["target_tokens"]) if row["kind"] == "cross" else sources
    bottom = len(weights) * CELL
    if row["kind"] == "encoder_slots":
        indices = range(0, weights.shape[1], SLOT_STEP)
        below = [_text((index + 0.5) * width, bottom + 12, str(index), 'text-anchor="middle"') for index in indices]
    else:
        turned = [
            f"translate({(index + 0.5) * width + 3:.1f} {bottom + 5}) rotate(-90)" for index in range(len(sources))
        ]
        below = [f'<text transform="{turn}">{escape(name)}</text>' for turn, name in zip(turned, sources, strict=True)]
    beside = "".join(_text(-4, (index + 0.72) * CELL, name) for index, name in enumerate(names))
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
    """Yield one path for each colour, in units of cells."""
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
        _text((index + 0.5) * 28, 30, f"{step:g}", 'text-anchor="middle"') for index, step in enumerate(scale[0])
    )
    notes = "".join(_text(width / 2, 52 + 15 * index, note, 'text-anchor="middle"') for index, note in enumerate(NOTES))
    left = (width - size) / 2
    return f'<g transform="translate({left} 0)"><g transform="scale(28 18)">{cells}</g>{numbers}</g>{notes}'
