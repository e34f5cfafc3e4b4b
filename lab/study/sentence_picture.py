"""Attention maps of one sentence by all systems, as SVG that is written directly to be small."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from lab.bench.record import Result, Row
from lab.bench.style import GREY
from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.model.config import ArchitectureConfig, RecurrentConfig

# Pixels. A picture is as wide as a text column.
WIDTH, COLUMNS, MARGIN = 700, 2, 10
PANEL = (WIDTH - 2 * MARGIN) // COLUMNS
LABELS, MAP = 70, 256  # widths of a row's label and of a map
CELL = 17  # height
FOOT = 72  # height below a map
LINE = 14  # height of a line of text above a map
PICTURE_HEAD, PICTURE_FOOT = 62, 100
ROWS_WITHOUT_MAP = 5  # height, in rows, of a panel without a map
TITLE_LETTERS, LETTERS = 50, 62  # maximum lengths of lines of text above a map
VOCABULARY = 6000  # any size
SLOT_STEP = 4  # distance between numbered projected keys
STEP = 36  # width of a colour of the legend

POSITIVE, NEGATIVE, ZERO = "#0b4f8a", "#b5480b", "#dedede"
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
    "Each row is an output token, or a source token for an encoder.",
    "Each column is a token that it attends to, or a projected key. Numbers are percent.",
    "Grey is exactly 0: the position is masked, or the weight underflows float32.",
    "A piece with a leading dot continues the word before it.",
)
PICTURES = {  # titles by file name
    "one-sentence-recurrent.svg": "Recurrent models that attend to the whole source",
    "one-sentence-local-and-hard.svg": "Recurrent models with local or hard attention",
    "one-sentence-transformers.svg": "Cross-attention of Transformers",
    "one-sentence-encoders.svg": "Self-attention of encoders",
}

Matrix = NDArray[np.float64]


def draw_sentence(result: Result, folder: Path) -> None:
    """Write the files of `PICTURES` that have at least one map."""
    for name, title in PICTURES.items():
        if rows := [row for row in result.rows if picture_of(row) == name]:
            (folder / name).write_text(picture(title, rows), encoding="utf-8")


def picture_of(row: Row) -> str:
    """Return the name of the picture that shows a row."""
    recurrent, local_and_hard, transformers, encoders = PICTURES
    if row["kind"] in ("encoder", "encoder_slots"):
        return encoders
    config = _configs().get(row["model"])
    if not isinstance(config, RecurrentConfig):
        return transformers
    return recurrent if (config.window, config.selection) == ("global", "soft") else local_and_hard


def picture(title: str, rows: Sequence[Row]) -> str:
    """Return the SVG of rows of the step `sentence`, in the order of `lab.zoo.systems.SYSTEMS`."""
    ranks = {name: index for index, name in enumerate(_configs())}
    panels = sorted(rows, key=lambda row: ranks.get(row["model"], len(ranks)))
    lines = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    parts, top = [], PICTURE_HEAD
    for line in lines:
        heads = [_head(row) for row in line]
        head = LINE * max(map(len, heads)) + 8
        for column, (row, texts) in enumerate(zip(line, heads, strict=True)):
            below = _no_map() if row["kind"] is None else _map(row)
            panel = "".join([*texts, f'<g transform="translate({LABELS} {head})">{below}</g>'])
            parts.append(f'<g transform="translate({MARGIN + column * PANEL} {top})">{panel}</g>')
        top += head + FOOT + CELL * max(map(_height, line))
    height = top + PICTURE_FOOT
    has_negative = any(np.min(row["map"]) < 0 for row in rows if row["kind"] is not None)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="10">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            _text(MARGIN, 22, title, 'font-size="15" font-weight="bold"'),
            _text(MARGIN, 41, f"“{panels[0]['sentence']}”", 'font-size="13" font-style="italic"'),
            *parts,
            f'<g transform="translate({MARGIN} {top})">{_legend(has_negative)}</g>',
            "</svg>\n",
        ]
    )


def _configs() -> dict[str, ArchitectureConfig]:
    """Return the configurations of all systems by the names of their bundles."""
    return {bundle_name(name): system.make_config(VOCABULARY) for name, system in SYSTEMS.items()}


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


def _head(row: Row) -> list[str]:
    """Return the lines of text above a map."""
    head: list[str] = []
    for text, style, letters in (
        (_description(row), 'font-size="11" font-weight="bold"', TITLE_LETTERS),
        (row["model"], f'fill="{GREY}"', LETTERS),
        (f"“{row['text']}”", 'font-style="italic"', LETTERS),
        (remarks(row), 'fill="#a03000"', LETTERS),
    ):
        for line in textwrap.wrap(text, letters):
            head.append(_text(0, 12 + LINE * len(head), line, style))
    return head


def _description(row: Row) -> str:
    """Return the current description of a known system, or else that of the measured bundle."""
    descriptions = {bundle_name(name): system.description for name, system in SYSTEMS.items()}
    return descriptions.get(row["model"]) or str(row["description"])


def _no_map() -> str:
    """Return the placeholder for a model without attention."""
    height = ROWS_WITHOUT_MAP * CELL
    style = 'fill="none" stroke="#888" stroke-dasharray="4 3"'
    text = _text(MAP / 2, height / 2 + 3, "the whole source, in one vector", f'text-anchor="middle" fill="{GREY}"')
    return f'<rect width="{MAP}" height="{height}" {style}/>{text}'


def _map(row: Row) -> str:
    weights: Matrix = np.array(row["map"])
    width = MAP / weights.shape[1]
    sources = token_labels(row["source_tokens"])
    names = token_labels(row["target_tokens"]) if row["kind"] == "cross" else sources
    bottom = len(weights) * CELL
    if row["kind"] == "encoder_slots":
        indices = range(0, weights.shape[1], SLOT_STEP)
        below = [_text((index + 0.5) * width, bottom + 13, str(index), 'text-anchor="middle"') for index in indices]
        below.append(_text(MAP / 2, bottom + 29, "number of the projected key", 'text-anchor="middle"'))
    else:
        turned = [
            f"translate({(index + 0.5) * width + 3:.1f} {bottom + 6}) rotate(-90)" for index in range(len(sources))
        ]
        below = [f'<text transform="{turn}">{escape(name)}</text>' for turn, name in zip(turned, sources, strict=True)]
    beside = "".join(_text(-4, (index + 0.72) * CELL, name) for index, name in enumerate(names))
    return "".join(
        [
            f'<g transform="scale({width:.4f} {CELL})">{"".join(_cells(np.rint(100 * weights), weights == 0))}</g>',
            f'<g font-size="9" text-anchor="middle">{"".join(_numbers(np.rint(100 * weights), width))}</g>',
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
        if abs(percent) > NUMBERED and width > 0.6 * CELL:
            style = 'fill="white"' if abs(percent) > LIGHT_TEXT else ""
            yield _text(round((column + 0.5) * width, 1), round((row + 0.7) * CELL, 1), f"{percent:.0f}", style)


def _legend(has_negative: bool) -> str:
    steps = [0.0, 0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0]
    if has_negative:
        steps = [-1.0, -0.8, -0.6, -0.4, -0.2, *steps]
    scale = 100 * np.array([steps])
    cells = "".join(_cells(scale, scale == 0))
    numbers = "".join(
        _text((index + 0.5) * STEP, 32, f"{step:g}", 'text-anchor="middle"') for index, step in enumerate(scale[0])
    )
    name = _text(len(steps) * STEP + 8, 14, "weight, %")
    notes = "".join(_text(0, 50 + LINE * index, note, f'fill="{GREY}"') for index, note in enumerate(NOTES))
    return f'<g transform="scale({STEP} 20)">{cells}</g>{numbers}{name}{notes}'
