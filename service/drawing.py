"""Pictures of attention maps as SVG: a heat map, an alignment, or a grid of all heads.

The functions take numbers and labels and return the text of an SVG file. They draw dark marks on
white, with one hue, so that the pictures can be printed at the width of a column and read with any
colour vision. The module imports nothing else of the service, because the client for Python draws
with it, too.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FONT = "DejaVu Sans, Noto Sans, Verdana, Arial, sans-serif"
# From white to a dark blue; the lightness falls evenly.
COLOURS = ((255, 255, 255), (190, 214, 236), (88, 150, 203), (16, 86, 148), (3, 38, 79))
TEXT, LINE = "#1b1f24", "#105694"
GAMMA = 0.6  # below 1, so that small weights stay visible
LEVELS = 24  # shades of a map whose cells are drawn together
MIN_PERCENT = 5  # smaller weights are shown by colour only
CELL_LIMITS = (40, 64)  # rows or columns of the largest map with numbers in its cells, and with labels
LABEL_INTERVAL = 4  # of the rows and columns of larger maps
NUMBERED_CELL, PLAIN_CELL = 30, 14  # pixels
CHARACTER_WIDTH = 7.8  # pixels of a label at 13 px, on average
MARGIN = 12
View = Literal["heatmap", "alignment", "heads"]
TITLES: Mapping[str, str] = {  # of the kinds of attention; the first one that a model has is the default
    "cross": "Cross-attention",
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "encoder_slots": "Encoder attention to projected keys",
}
# Pointing at a row of an alignment leaves only its lines. No script is needed.
STYLE = (
    "<style>.attends:hover text{font-weight:600}.attends:hover path{stroke-opacity:.9}"
    "svg:has(.attends:hover) .attends:not(:hover) path{stroke-opacity:.03}</style>"
)
_MARKS = {" ": "␣", "\n": r"\n", "\t": r"\t", "\r": r"\r"}
# All but whitespace and characters without width; `visible` of the page does the same.
_VISIBLE = re.compile(
    "[^\\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2


@dataclass(frozen=True)
class Matrix:
    """One attention map (rows, columns) with labels; `rows` attend to `columns`."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    weights: NDArray[np.float32]

    @property
    def shares(self) -> NDArray[np.float32]:
        """Magnitudes of the weights as shares of the largest one, 0 to 1."""
        magnitudes = np.abs(self.weights)
        return (magnitudes / max(float(magnitudes.max(initial=0)), 1e-9)).astype(np.float32)


def axis_labels(
    kind: str, tokens: Mapping[str, Sequence[str]], num_columns: int
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the labels of the rows and columns of a map; `tokens` are fields of the API."""
    source = tokens["source_tokens"]
    if kind == "cross":
        return tokens["target_tokens"], source
    if kind == "decoder":
        return tokens["target_tokens"], tokens["decoder_input_tokens"]
    return source, source if kind == "encoder" else [f"key {index}" for index in range(num_columns)]


def draw(
    view: View,
    title: str,
    layers: Sequence[int],
    indices: Sequence[int],
    labels: tuple[Sequence[str], Sequence[str]],
    weights: NDArray[np.float32],
    reduction: str = "mean",
) -> str:
    """Return a picture of the weights (layers, heads, rows, columns) of the heads with `indices`.

    Only the view heads shows several maps. The others show one, the `reduction` of the heads.
    """
    if view == "heads":
        return heads(title, layers, indices, weights)
    which = f"head {indices[0]}" if len(indices) == 1 else f"{reduction} of {len(indices)} heads"
    rows, columns = map(_visible, labels)
    matrix = Matrix(f"{title}, layer {layers[0]}, {which}", rows, columns, weights[0, 0])
    return alignment(matrix) if view == "alignment" else heat_map(matrix)


def heat_map(matrix: Matrix) -> str:
    """Return a heat map: a row for each token that attends, a column for each attended token.

    Of a large map, one of `LABEL_INTERVAL` tokens has a label.
    """
    num_rows, num_columns = matrix.weights.shape
    is_numbered = max(num_rows, num_columns) <= CELL_LIMITS[0]
    has_all_labels = max(num_rows, num_columns) <= CELL_LIMITS[1]
    cell = NUMBERED_CELL if is_numbered else PLAIN_CELL if has_all_labels else 4
    interval = 1 if has_all_labels else LABEL_INTERVAL
    rows, columns = matrix.rows[::interval], matrix.columns[::interval]
    left = MARGIN + _longest(rows) + 8.0
    top = 2 * MARGIN + 13 + 0.75 * _longest(columns) + 12
    right = MARGIN + (0.75 * label_width(columns[-1]) if num_columns else 0.0)
    width = max(left + num_columns * cell + right, 2 * MARGIN + label_width(matrix.title))
    parts = [_title(matrix.title)]
    for index, label in enumerate(rows):
        parts.append(_text(left - 8, top + (index * interval + 0.5) * cell, label, "end"))
    for index, label in enumerate(columns):
        place = f"translate({left + (index * interval + 0.5) * cell:g} {top - 8:g}) rotate(-45)"
        parts.append(f'<text transform="{place}">{_escape(label)}</text>')
    if is_numbered:
        parts += _numbered_cells(matrix, left, top, cell)
    else:
        parts += _cells(matrix, left, top, cell * num_columns, cell * num_rows)
    return _document(width, top + num_rows * cell + MARGIN, parts)


def alignment(matrix: Matrix) -> str:
    """Return an alignment: columns on the left, rows on the right, and lines as strong as the
    attention between them.
    """
    num_rows, num_columns = matrix.weights.shape
    step = 26 if max(num_rows, num_columns) <= CELL_LIMITS[0] else 17
    left = MARGIN + max(_longest(matrix.columns), label_width("attended to"))
    right = left + 240
    width = max(
        right + max(_longest(matrix.rows), label_width("attends")) + MARGIN, 2 * MARGIN + label_width(matrix.title)
    )
    top = 62
    height = max(num_rows, num_columns) * step
    column_top, row_top = (top + (height - count * step) / 2 + step / 2 for count in (num_columns, num_rows))
    parts = [
        STYLE,
        _title(matrix.title),
        _text(left, top - 12, "attended to", "end", size=11),
        _text(right, top - 12, "attends", size=11),
    ]
    parts += [_text(left, column_top + i * step, label, "end") for i, label in enumerate(matrix.columns)]
    shares = matrix.shares
    for row, label in enumerate(matrix.rows):
        y2 = row_top + row * step
        best = np.argsort(-matrix.weights[row], kind="stable")[:3]
        attended = ", ".join(f"{matrix.columns[column]} {matrix.weights[row, column]:.0%}" for column in best)
        parts.append(f'<g class="attends"><title>{_escape(f"{label} attends to {attended}")}</title>')
        parts.append(f'<g fill="none" stroke="{LINE}" stroke-linecap="round">')
        for column in np.flatnonzero(shares[row] >= 0.02):
            share, y1 = float(shares[row, column]), column_top + column * step
            x1, x2 = left + 6, right - 6
            parts.append(
                f'<path d="M{x1:g} {y1:g}C{(x1 + x2) / 2:g} {y1:g} {(x1 + x2) / 2:g} {y2:g} {x2:g} {y2:g}" '
                f'stroke-width="{0.6 + 5 * share:.2f}" stroke-opacity="{0.06 + 0.84 * share:.2f}"/>'
            )
        parts.append(f"</g>{_text(right, y2, label)}</g>")
    return _document(width, top + height + MARGIN, parts)


def heads(title: str, layers: Sequence[int], indices: Sequence[int], weights: NDArray[np.float32]) -> str:
    """Return a grid of small heat maps of weights (layers, heads, rows, columns): a line for each
    layer, a column for each head. Layers and heads have their indices.
    """
    size, gap, left, top = 84, 8, 76, 62
    parts = [_title(title)]
    for column, head in enumerate(indices):
        parts.append(_text(left + column * (size + gap) + size / 2, top - 12, f"head {head}", "middle", size=11))
    for line, layer in enumerate(layers):
        y = top + line * (size + gap)
        parts.append(_text(left - 8, y + size / 2, f"layer {layer}", "end", size=11))
        for column, of_head in enumerate(weights[line]):
            x = left + column * (size + gap)
            parts.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="none" stroke="#d5dae0"/>')
            parts += _cells(Matrix("", (), (), of_head), x, y, size, size)
    width = max(left + len(indices) * (size + gap) + MARGIN, 2 * MARGIN + label_width(title))
    return _document(width, top + len(layers) * (size + gap) + MARGIN, parts)


def colour_of(share: float) -> tuple[int, int, int]:
    """Return the colour of a weight, from its share of the largest weight."""
    position = min(1.0, max(0.0, share)) ** GAMMA * (len(COLOURS) - 1)
    index = min(len(COLOURS) - 2, int(position))
    low, high = COLOURS[index], COLOURS[index + 1]
    red, green, blue = (round(a + (b - a) * (position - index)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def label_width(text: str) -> float:
    """Estimate the width of a label in pixels; Chinese and Japanese characters are wide."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return CHARACTER_WIDTH * (len(text) + 0.8 * wide)


def _escape(text: str) -> str:
    """Return a text for XML, which has no control characters, not even escaped ones."""
    return escape_html(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def _visible(tokens: Sequence[str]) -> list[str]:
    """Return tokens without whitespace around them, and those of invisible characters as marks."""
    return [
        token.strip() if _VISIBLE.search(token) else "".join(_MARKS.get(c, f"\\u{ord(c):04x}") for c in token)
        for token in tokens
    ]


def _longest(labels: Iterable[str]) -> float:
    return max(map(label_width, labels), default=0)


def _numbered_cells(matrix: Matrix, left: float, top: float, cell: float) -> Iterator[str]:
    shares = matrix.shares
    for (row, column), weight in np.ndenumerate(matrix.weights):
        red, green, blue = colour_of(float(shares[row, column]))
        x, y = left + column * cell, top + row * cell
        yield (
            f'<rect x="{x + 0.5:g}" y="{y + 0.5:g}" width="{cell - 1:g}" height="{cell - 1:g}" rx="2" '
            f'fill="#{red:02x}{green:02x}{blue:02x}"/>'
        )
        percent = round(100 * float(weight))
        if abs(percent) >= MIN_PERCENT:
            fill = "#fff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else TEXT
            yield _text(x + cell / 2, y + cell / 2, str(percent), "middle", size=11, fill=fill)


def _cells(matrix: Matrix, left: float, top: float, width: float, height: float) -> Iterator[str]:
    """Draw all cells of one shade as one path, which keeps large maps small; white is left out."""
    num_rows, num_columns = matrix.weights.shape
    levels = np.round(matrix.shares**GAMMA * LEVELS).astype(int)
    yield (
        f'<g transform="translate({left:g} {top:g}) scale({width / max(1, num_columns):.5g} '
        f'{height / max(1, num_rows):.5g})" shape-rendering="crispEdges">'
    )
    for level in range(1, LEVELS + 1):
        cells = np.argwhere(levels == level)
        if len(cells):
            red, green, blue = colour_of((level / LEVELS) ** (1 / GAMMA))
            path = "".join(f"M{column} {row}h1v1h-1z" for row, column in cells)
            yield f'<path fill="#{red:02x}{green:02x}{blue:02x}" d="{path}"/>'
    yield "</g>"


def _title(text: str) -> str:
    return f'<text x="{MARGIN}" y="{MARGIN + 11}" font-weight="600">{_escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str = "start", *, size: int = 13, fill: str = TEXT) -> str:
    """Return a text whose middle line is at `y`."""
    style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" dy=".35em" {style}>{_escape(text)}</text>'


def _document(width: float, height: float, parts: Iterable[str]) -> str:
    width, height = round(width), round(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONT}" font-size="13" fill="{TEXT}">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
