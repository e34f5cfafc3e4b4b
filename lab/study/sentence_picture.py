"""Attention maps of one sentence by all systems."""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from numpy.typing import NDArray

from lab.bench.record import Result, Row
from lab.bench.style import BLACK, GREY, WIDTH, save, style
from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.model.config import ArchitectureConfig, RecurrentConfig

COLUMNS = 2
CELL, HEAD, FOOT = 0.17, 0.75, 0.55  # inches: a row of a map, and what is above and below a map
LETTERS = 62  # maximum length of a line of text above a map
VOCABULARY = 6000  # any size
SLOT_STEP = 4  # distance between numbered projected keys
ROWS_WITHOUT_MAP = 5  # height of its panel
ZERO = "#dedede"
GAMMA = 0.65  # below 1, so that small weights are visible
COLOURS = LinearSegmentedColormap.from_list("weights", ["#b5480b", "white", "#0b4f8a"]).with_extremes(bad=ZERO)
NUMBERED, MAX_NUMBERED = 9, 24  # percent, and columns of a map: larger weights are also printed as numbers
LIGHT_TEXT = 0.4  # the numbers of larger weights are white
KINDS = {
    "cross": "cross-attention",
    "encoder": "encoder's self-attention",
    "encoder_slots": "encoder's attention to projected keys, which are mixtures of the source",
    None: "no attention",
}
NOTES = """Each row is an output token, or a source token for an encoder.
Each column is a token that it attends to, or a projected key. Numbers are percent. Orange is negative.
Grey is exactly 0: the position is masked, or the weight underflows float32.
A piece with a leading dot continues the word before it."""
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
            picture(title, rows, folder / name)


def picture_of(row: Row) -> str:
    """Return the name of the picture that shows a row."""
    recurrent, local_and_hard, transformers, encoders = PICTURES
    if row["kind"] in ("encoder", "encoder_slots"):
        return encoders
    config = _configs().get(row["model"])
    if not isinstance(config, RecurrentConfig):
        return transformers
    return recurrent if (config.window, config.selection) == ("global", "soft") else local_and_hard


def picture(title: str, rows: Sequence[Row], path: Path) -> None:
    """Draw rows of the step `sentence`, in the order of `lab.zoo.systems.SYSTEMS`."""
    ranks = {name: index for index, name in enumerate(_configs())}
    panels = sorted(rows, key=lambda row: ranks.get(row["model"], len(ranks)))
    heights = [
        HEAD + FOOT + CELL * max(map(_height, panels[start : start + COLUMNS]))
        for start in range(0, len(panels), COLUMNS)
    ]
    with style():
        figure, grid = pyplot.subplots(
            len(heights), COLUMNS, figsize=(WIDTH, sum(heights) + 1), height_ratios=heights, squeeze=False
        )
        for axes, row in zip_longest(grid.flat, panels):
            axes.set(xticks=[], yticks=[], frame_on=False)
            if row is not None:
                _draw_panel(axes, row)
        figure.suptitle(f"{title}\n“{panels[0]['sentence']}”", x=0.01, ha="left", fontsize=10)
        figure.supxlabel(NOTES, x=0.01, ha="left", fontsize=7.5, color=GREY)
        save(figure, path)


def _configs() -> dict[str, ArchitectureConfig]:
    """Return the configurations of all systems by the names of their bundles."""
    return {bundle_name(name): system.make_config(VOCABULARY) for name, system in SYSTEMS.items()}


def token_labels(tokens: Sequence[str]) -> list[str]:
    """Return labels of tokens: pieces that continue a word get a leading dot."""
    return [_printable(f"·{token}" if token[:1].isalnum() else token.removeprefix(" ")) for token in tokens]


def _printable(text: str) -> str:
    """Replace characters that SVG cannot have, such as those of single bytes."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


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


def colours_of(weights: Matrix) -> Any:
    """Return numbers from -1 to 1 that stand for colours, and no number for exactly 0."""
    return np.ma.masked_array(np.sign(weights) * np.minimum(np.abs(weights), 1) ** GAMMA, weights == 0)


def _draw_panel(axes: Axes, row: Row) -> None:
    lines = [row["model"], f"“{_printable(row['text'])}”", remarks(row)]
    head = [_description(row), *(part for line in lines for part in textwrap.wrap(line, LETTERS))]
    axes.set_title("\n".join(head), fontsize=7, fontweight="normal", parse_math=False)
    if row["kind"] is None:
        axes.text(0.5, 0.5, "the whole source, in one vector", ha="center", transform=axes.transAxes, color=GREY)
        return
    weights: Matrix = np.array(row["map"])
    axes.imshow(colours_of(weights), COLOURS, vmin=-1, vmax=1, aspect="auto", interpolation="none")
    axes.grid(visible=False)
    sources = token_labels(row["source_tokens"])
    names = token_labels(row["target_tokens"]) if row["kind"] == "cross" else sources
    axes.set_yticks(range(len(names)), names)
    if row["kind"] == "encoder_slots":
        numbers = np.arange(0, weights.shape[1], SLOT_STEP)
        axes.set_xticks(numbers, list(map(str, numbers)))
        axes.set_xlabel("number of the projected key")
    else:
        axes.set_xticks(range(len(sources)), sources, rotation=90)
    axes.tick_params(length=0, labelsize=6.5, pad=1)
    for (index, column), weight in np.ndenumerate(weights):
        if round(100 * abs(weight)) > NUMBERED and weights.shape[1] <= MAX_NUMBERED:
            colour = "white" if abs(weight) > LIGHT_TEXT else BLACK
            axes.text(column, index, f"{100 * weight:.0f}", ha="center", va="center", size=6, color=colour)


def _description(row: Row) -> str:
    """Return the current description of a known system, or else that of the measured bundle."""
    descriptions = {bundle_name(name): system.description for name, system in SYSTEMS.items()}
    return descriptions.get(row["model"]) or str(row["description"])
