"""The tables and the picture of the step `alignment`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab.bench import style
from lab.bench.record import Result, Row
from lab.bench.report import table

STEP_TEXTS = {"writes": "step that writes", "reads": "step that reads"}
BASELINES = {"random": "a random word", "diagonal": "the diagonal", "best": "the best single links"}
PICTURE = "alignment.svg"


def alignment_tables(result: Result) -> Mapping[str, str]:
    """Return the tables of the annotation, of the systems, and of the layers and heads."""
    return {
        "alignment-pairs": _pairs(result),
        "alignment": _systems(result),
        "alignment-heads": _heads(result),
    }


def _rows(result: Result, kind: str) -> list[Row]:
    return [row for row in result.rows if row["kind"] == kind]


def _percent(row: Row) -> str:
    low, high = row["interval"]
    return f"{100 * row['aer']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _pairs(result: Result) -> str:
    (row,) = _rows(result, "pairs")
    return (
        f"{row['pairs']} pairs, {row['source_words']:,} English and {row['target_words']:,} German words, "
        f"{row['sure']:,} sure and {row['possible']} possible links. Agreement of the passes without the final "
        f"period: F1 {row['sure_f1']:.3f} for sure links and {row['all_f1']:.3f} for all links, Cohen's kappa "
        f"{row['kappa']:.3f}, AER {100 * row['aer']:.1f} %."
    )


def _systems(result: Result) -> str:
    head = ["links", "layer and heads", "AER in %", "difference from `/v1/align`"]
    body = [[f"baseline: {BASELINES[row['baseline']]}", "", _percent(row), ""] for row in _rows(result, "baseline")]
    for row in _rows(result, "align"):
        model = row["model"]
        body.append([f"`{model}`, `/v1/align`", _align_text(row), _percent(row), ""])
        for one in _rows(result, "chosen"):
            if one["model"] == model:
                steps = STEP_TEXTS[one["steps"][0]] if len(one["steps"]) == 1 else "either step"
                names = "; ".join(dict.fromkeys(_map_text(*name) for name in one["chosen"]))
                value, low, high = (100 * number for number in one["difference"])
                difference = f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"
                body.append([f"`{model}`, best map, {steps}", names, _percent(one), difference])
    return table(head, body)


def _align_text(row: Row) -> str:
    heads = ", ".join(map(str, row["heads"]))
    name = "heads" if len(row["heads"]) > 1 else "head"
    return f"layer {row['layer']}, {name} {heads}, {STEP_TEXTS[row['step']]}"


def _map_text(layer: int | None, head: int | None, step: str) -> str:
    where = "all layers" if layer is None else f"layer {layer}"
    return f"{where}, {'all heads' if head is None else f'head {head}'}, {STEP_TEXTS[step]}"


def _heads(result: Result) -> str:
    """Return error rates by layer and head for models with several heads."""
    found = {(row["model"], row["step"], row["layer"], row["head"]): row["aer"] for row in _rows(result, "map")}
    num_heads = max((row["head"] or 0) for row in _rows(result, "map")) + 1
    body = []
    for model, step, layer in dict.fromkeys(key[:3] for key in found):
        if layer is not None:
            heads = [*range(num_heads), None]
            cells = [found.get((model, step, layer, head)) for head in heads]
            body.append([f"`{model}`", str(layer), step, *("" if one is None else f"{100 * one:.1f}" for one in cells)])
    return table(["model", "layer", "step", *(f"head {head}" for head in range(num_heads)), "mean of heads"], body)


def draw_alignment(result: Result, folder: Path) -> None:
    """Draw the error rate of each head, of `/v1/align` and of the baselines."""
    models = [row["model"] for row in _rows(result, "align")]
    with style.style():
        figure, axes = pyplot.subplots(figsize=(style.WIDTH, 0.9 + 0.62 * len(models)))
        for row in _rows(result, "baseline"):
            axes.axvline(100 * row["aer"], color=style.GREY, linestyle=":", linewidth=1)
            at = (100 * row["aer"], 1)
            axes.annotate(
                BASELINES[row["baseline"]],
                at,
                xytext=(0, 2),
                textcoords="offset points",
                xycoords=("data", "axes fraction"),
                ha="center",
                color=style.GREY,
                fontsize=7.5,
            )
        for index, model in enumerate(models):
            _draw_model(axes, index, [row for row in result.rows if row.get("model") == model])
        axes.set(yticks=range(len(models)), yticklabels=models, xlabel="alignment error rate in % (lower is better)")
        axes.set_ylim(len(models) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        legend = [
            Line2D([], [], color=style.ORANGE, marker="D", label="/v1/align, with 95 % interval"),
            Line2D([], [], color=style.BLUE, marker="o", linestyle="", label=f"a head, {STEP_TEXTS['writes']}"),
            Line2D(
                [],
                [],
                color=style.GREEN,
                marker="s",
                markerfacecolor="none",
                linestyle="",
                label=f"a head, {STEP_TEXTS['reads']}",
            ),
        ]
        style.describe(figure, "Word alignment by cross-attention", _note(result), legend, columns=3)
        style.save(figure, folder / PICTURE)


def _note(result: Result) -> str:
    (row,) = _rows(result, "pairs")
    return f"{row['pairs']} annotated pairs of English and German captions; each mark is one layer and head."


def _draw_model(axes: Axes, index: int, rows: Sequence[Row]) -> None:
    for row in rows:
        if row["kind"] == "align":
            low, high = (100 * one for one in row["interval"])
            axes.plot([low, high], [index - 0.22] * 2, color=style.ORANGE)
            axes.plot(100 * row["aer"], index - 0.22, "D", color=style.ORANGE)
        elif row["kind"] == "map" and row["head"] is not None:
            if row["step"] == "writes":
                axes.plot(100 * row["aer"], index, "o", color=style.BLUE)
            else:
                axes.plot(100 * row["aer"], index + 0.22, "s", color=style.GREEN, markerfacecolor="none")
