"""The picture of the results: Sightline's throughput as a multiple of that of its peers."""

from pathlib import Path

from matplotlib import pyplot
from matplotlib.patches import Patch

from lab.bench.report import METRICS, Results, all_figures, figures_of
from lab.bench.style import BLACK, BLUE, ORANGE, WIDTH, describe, save, style
from lab.bench.targets import COMPARISONS

PICTURE = "peers.svg"


def draw(results: Results, folder: Path) -> None:
    """Write the picture, with a bar for each ratio that was measured."""
    figures = all_figures(results)
    shown = [
        (f"{each.model}, {clients} {'client' if clients == 1 else 'clients'}", figure.value)
        for each in COMPARISONS
        for clients, figure in figures_of(figures, each, METRICS["requests/s"]).items()
    ]
    if not shown:
        return
    with style():
        figure, axes = pyplot.subplots(figsize=(WIDTH, 1.2 + 0.2 * len(shown)))
        for index, (_, value) in enumerate(shown):
            axes.barh(index, value, 0.8, color=BLUE if value >= 1 else ORANGE)
            axes.annotate(
                f"{value:.2f}", (0, index), xytext=(3, 0), textcoords="offset points", va="center", color="white"
            )
        axes.axvline(1, color=BLACK, linewidth=1, linestyle=":")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(shown)), [text for text, _ in shown])
        axes.set_xlabel("times as fast")
        describe(
            figure,
            "Throughput of Sightline as a multiple of the fastest peer's",
            "The dotted line is equal speed.",
            legend=[Patch(color=BLUE, label="at least as fast"), Patch(color=ORANGE, label="slower")],
        )
        save(figure, folder / PICTURE)
