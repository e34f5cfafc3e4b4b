"""Gradients of the layers of Transformers, with and without residual connections."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.ticker import LogLocator

from lab.bench.style import BLUE, GREEN, LIGHT_BLUE, LIGHT_ORANGE, ORANGE, WIDTH, describe, save, style

Diagnostics = Sequence[Sequence[Mapping[str, Any]]]  # of each seed, by epoch
SMALLEST = 1e-45  # of float32

LINES = {  # by number of layers: colours with and without residual connections, and marker
    2: (GREEN, "#999999", "s"),
    4: (LIGHT_BLUE, LIGHT_ORANGE, "^"),
    6: (BLUE, ORANGE, "o"),
}


def gradients(diagnostics: Diagnostics, epoch: int, part: str) -> list[float]:
    """Return the gradient norm of each layer of the "encoder" or "decoder", geometric mean of all
    seeds, at epoch 0 for the start of the training or -1 for its end.
    """
    of_seeds = [run[epoch]["gradients"] for run in diagnostics]
    names = sorted(name for name in of_seeds[0] if name.startswith(f"{part}."))
    return [float(np.exp(np.mean([np.log(max(of_seed[name], SMALLEST)) for of_seed in of_seeds]))) for name in names]


def ratio(diagnostics: Diagnostics, epoch: int, part: str) -> str:
    """Return the gradient norm of the first layer divided by that of the last."""
    norms = gradients(diagnostics, epoch, part)
    return "" if len(norms) < 2 else f"{norms[0] / norms[-1]:.1g}"


def total(diagnostics: Diagnostics, epoch: int) -> str:
    """Return the gradient norm of all parameters, geometric mean of all seeds."""
    squares = [sum(norm**2 for norm in run[epoch]["gradients"].values()) for run in diagnostics]
    return f"{np.exp(np.mean(np.log(squares)) / 2):.1f}"


def draw_gradients(with_residual: Mapping[int, Diagnostics], without: Mapping[int, Diagnostics], path: Path) -> None:
    """Draw the gradient norm of each layer before and after the training, with and without residual
    connections, by number of layers.
    """
    with style():
        figure, grid = pyplot.subplots(2, 2, figsize=(WIDTH, 5.4), sharex="col", sharey=True)
        for row, (epoch, moment) in zip(grid, ((0, "before the training"), (-1, "after the training")), strict=True):
            for axes, part in zip(row, ("encoder", "decoder"), strict=True):
                for depth, (colour, colour_without, marker) in LINES.items():
                    for by_depth, word, line in ((with_residual, "with", "-"), (without, "without", "--")):
                        if depth in by_depth:
                            axes.plot(
                                gradients(by_depth[depth], epoch, part),
                                color=colour if word == "with" else colour_without,
                                marker=marker,
                                linestyle=line,
                                label=f"{depth} layers, {word} residual connections",
                            )
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(numticks=7))
                axes.set_title(f"{part}, {moment}")
                axes.set_xticks(range(max(LINES)))
        for axes in grid[1]:
            axes.set_xlabel("layer")
        for axes in grid[:, 0]:
            axes.set_ylabel("norm of the gradient")
        describe(
            figure,
            "Gradients of the layers of Transformers",
            "Norm of the gradient of the mean loss for all parameters of a layer, on 16 sentences of dev.",
            legend=grid[0, 0].get_legend_handles_labels()[0],
        )
        save(figure, path)
