"""The picture of the results: Sightline's throughput as a multiple of that of its peers."""

from pathlib import Path

from matplotlib import pyplot
from matplotlib.patches import Patch

from lab.bench.report import Results, all_figures
from lab.bench.style import BLACK, BLUE, ORANGE, WIDTH, describe, save, style
from lab.bench.targets import LIBRARY, SERVERS

PICTURE = "peers.svg"


def draw(results: Results, folder: Path) -> None:
    """Write the picture, with a bar for each ratio that has a target and was measured."""
    figures = all_figures(results)
    shown = [target for target in (*SERVERS, *LIBRARY) if target.better == "higher" and target.figure in figures]
    if not shown:
        return
    with style():
        figure, axes = pyplot.subplots(figsize=(WIDTH, 1.2 + 0.2 * len(shown)))
        for index, target in enumerate(shown):
            value = figures[target.figure].value
            axes.barh(index, value, 0.8, color=BLUE if value >= target.limit else ORANGE)
            axes.vlines(target.limit, index - 0.4, index + 0.4, colors=BLACK, linewidth=2)
            axes.annotate(
                f"{value:.2f}", (0, index), xytext=(3, 0), textcoords="offset points", va="center", color="white"
            )
        axes.axvline(1, color=BLACK, linewidth=1, linestyle=":")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(shown)), [target.text for target in shown])
        axes.set_xlabel("times as fast")
        describe(
            figure,
            "Throughput of Sightline as a multiple of a peer's",
            "Black lines are targets. The dotted line is equal speed.",
            legend=[Patch(color=BLUE, label="target met"), Patch(color=ORANGE, label="target not met")],
        )
        save(figure, folder / PICTURE)
