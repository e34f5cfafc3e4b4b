"""Measure the alignment error rate of heads and of `/v1/align` on annotated pairs of sentences."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from lab.bench import style
from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bleu import interval, resamples
from lab.study.runs import translates
from lab.study.served import Served, served_models
from lab.study.word_links import (
    PAIRS,
    AnnotatedPair,
    Counts,
    Links,
    agreement,
    best_links,
    diagonal,
    error_counts,
    error_rate,
    random_counts,
    read_pairs,
)
from sightline.base.bundle import ALIGNMENT_STEPS, AlignmentStep, Manifest
from sightline.base.text.words import merge_weights, rows_that_read, words_of
from sightline.service.tasks.align import strongest_links

NAME = "alignment"
DIGITS = 4
# The layer, the head and the step of a map; without a head the mean of all heads of the layer,
# without a layer the mean of all layers and heads.
Candidate = tuple[int | None, int | None, AlignmentStep]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help="folder of bundles; models without cross-attention are skipped")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="table of annotated pairs")


def measure(arguments: argparse.Namespace) -> Result:
    """Score the reference translations with each served model, and compare its links."""
    pairs = read_pairs(arguments.pairs)
    rows: list[Row] = [_facts(pairs), *_baselines(pairs)]
    for served, manifest in served_models(arguments.bundles):
        if translates(manifest) and manifest.cross_attention is not None:
            rows += measure_model(served, manifest, pairs)
    return Result(rows=rows)


def _facts(pairs: Sequence[AnnotatedPair]) -> Row:
    links = [pair.links for pair in pairs]
    return {
        "kind": "pairs",
        "pairs": len(pairs),
        "source_words": sum(len(pair.source_words) for pair in pairs),
        "target_words": sum(len(pair.target_words) for pair in pairs),
        "sure": sum(len(reference.sure) for reference in links),
        "possible": sum(len(reference.possible - reference.sure) for reference in links),
        **{name: round(float(value), DIGITS) for name, value in agreement(pairs).items()},
    }


def _baselines(pairs: Sequence[AnnotatedPair]) -> list[Row]:
    sizes = [(len(pair.source_words), len(pair.target_words)) for pair in pairs]
    diagonals = [diagonal(*size) for size in sizes]
    best = [best_links(pair.links, size[1]) for pair, size in zip(pairs, sizes, strict=True)]
    chance = np.array([random_counts(pair.links, *size) for pair, size in zip(pairs, sizes, strict=True)])
    counts = {"random": chance, "diagonal": _counts(diagonals, pairs), "best": _counts(best, pairs)}
    return [{"kind": "baseline", "baseline": name, **_estimate(errors)} for name, errors in counts.items()]


def measure_model(served: Served, manifest: Manifest, pairs: Sequence[AnnotatedPair]) -> list[Row]:
    """Return the error rates of a model's heads, of `/v1/align`, and of the choice of a head on one
    half of the pairs for the other half.
    """
    of_pairs = [links_of(served, manifest.name, pair) for pair in pairs]
    counts = {candidate: _counts([links[candidate] for links in of_pairs], pairs) for candidate in of_pairs[0]}
    aligned, heads = _aligned(served, manifest.name, pairs)
    model = {"model": manifest.name}
    return [
        {**model, "kind": "align", **heads, **_estimate(aligned)},
        *(
            {**model, "kind": "map", "layer": layer, "head": head, "step": step, **_estimate(errors)}
            for (layer, head, step), errors in counts.items()
        ),
        *(
            {**model, "kind": "chosen", "steps": list(steps), **_choose(counts, steps, aligned)}
            for steps in (ALIGNMENT_STEPS[:1], ALIGNMENT_STEPS)
            if sum(step in steps for _, _, step in counts) > 1  # else there is nothing to choose
        ),
    ]


def links_of(served: Served, model: str, pair: AnnotatedPair) -> dict[Candidate, Links]:
    """Return the links of each map of a pair: the largest weight of each target word. Weights of
    tokens become weights of words as in `/v1/align`, with `merge_weights`. Raises `ValueError` if
    the service rejects the pair, or splits it into other words.
    """
    body = {"model": model, "inputs": [pair.source], "targets": [pair.target], "kinds": ["cross"]}
    (output,) = served.post("/v1/attention", body)[0]["outputs"]
    (entry,) = output["maps"]
    maps = np.reshape(np.array(entry["data"], np.float32), entry["shape"])  # (L, H, T, S)
    sources, targets = (
        words_of(text, [None if span is None else tuple(span) for span in output[f"{side}_offsets"]])
        for text, side in ((pair.source, "source"), (output["text"], "target"))
    )
    _check_words(model, pair, [word.text for word in sources], [word.text for word in targets])
    rows, columns = ([word.tokens for word in words] for words in (targets, sources))
    links: dict[Candidate, Links] = {}
    for step, of_step in zip(ALIGNMENT_STEPS, (maps, rows_that_read(maps)), strict=True):
        words = merge_weights(of_step, rows, columns)
        chosen: dict[Candidate, NDArray[np.float32]] = {
            (layer, head, step): matrix for layer, of_heads in enumerate(words) for head, matrix in enumerate(of_heads)
        }
        if len(chosen) > 1:
            chosen |= {(layer, None, step): of_heads.mean(axis=0) for layer, of_heads in enumerate(words)}
            chosen[None, None, step] = words.mean(axis=(0, 1))
        links |= {
            candidate: frozenset((source, word) for source, word, _ in strongest_links(weights))
            for candidate, weights in chosen.items()
        }
    return links


def _check_words(model: str, pair: AnnotatedPair, sources: Sequence[str], targets: Sequence[str]) -> None:
    if list(sources) != pair.source_words or list(targets) != pair.target_words:
        raise ValueError(
            f"{model} must have the annotated words of the pair {pair.source!r}, {pair.target!r}, got {sources} and "
            f"{targets}; its tokenizer changes the text, or joins words"
        )


def _aligned(served: Served, model: str, pairs: Sequence[AnnotatedPair]) -> tuple[Counts, dict[str, Any]]:
    """Return the counts of the links of `/v1/align`, and its step, layer and heads."""
    links, output = [], None
    for pair in pairs:
        body = {"model": model, "inputs": [pair.source], "targets": [pair.target]}
        (output,) = served.post("/v1/align", body)[0]["outputs"]
        links.append(frozenset((source, word) for source, word, _ in output["links"]))
    assert output is not None, "there are pairs"
    return _counts(links, pairs), {name: output[name] for name in ("step", "layer", "heads")}


def _choose(counts: Mapping[Candidate, Counts], steps: Sequence[str], aligned: Counts) -> dict[str, Any]:
    """Choose the best map on each half of the pairs and count its errors on the other half."""
    halves = np.arange(len(aligned)) % 2 == 0
    tested, names = np.zeros_like(aligned), []
    for half in (halves, ~halves):
        able = [candidate for candidate in counts if candidate[2] in steps]
        best = min(able, key=lambda candidate: float(error_rate(counts[candidate][half].sum(axis=0))))
        tested[~half] = counts[best][~half]
        names.append(list(best))
    return {"chosen": names, **_estimate(tested), "difference": _difference(tested, aligned)}


def _counts(links: Sequence[Links], pairs: Sequence[AnnotatedPair]) -> Counts:
    """Return `error_counts` of each pair, (N, 2)."""
    return np.array([error_counts(of_pair, pair.links) for of_pair, pair in zip(links, pairs, strict=True)], np.float64)


def _resampled(counts: Counts) -> Counts:
    return error_rate(resamples(len(counts)) @ counts)


def _estimate(counts: Counts) -> dict[str, Any]:
    low, high = interval(_resampled(counts))
    return {"aer": round(float(error_rate(counts.sum(axis=0))), DIGITS), "interval": [round(low, 4), round(high, 4)]}


def _difference(counts: Counts, others: Counts) -> list[float]:
    """Return the difference of two error rates and its interval, over the same samples of pairs."""
    value = float(error_rate(counts.sum(axis=0)) - error_rate(others.sum(axis=0)))
    return [round(number, DIGITS) for number in (value, *interval(_resampled(counts) - _resampled(others)))]


STEP_TEXTS = {"writes": "step that writes", "reads": "step that reads"}
BASELINES = {"random": "a random word", "diagonal": "the diagonal", "best": "the best single links"}
PICTURE = "alignment.svg"


def tables(result: Result) -> Mapping[str, str]:
    """Return the tables of the annotation, of the systems, and of the layers and heads."""
    return {"alignment-pairs": _pairs(result), "alignment": _systems(result), "alignment-heads": _heads(result)}


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
        for choice in _rows(result, "chosen"):
            if choice["model"] == model:
                steps = STEP_TEXTS[choice["steps"][0]] if len(choice["steps"]) == 1 else "either step"
                names = "; ".join(dict.fromkeys(_map_text(*name) for name in choice["chosen"]))
                value, low, high = (100 * number for number in choice["difference"])
                difference = f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"
                body.append([f"`{model}`, best map, {steps}", names, _percent(choice), difference])
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
    rates = {(row["model"], row["step"], row["layer"], row["head"]): row["aer"] for row in _rows(result, "map")}
    num_heads = max((row["head"] or 0) for row in _rows(result, "map")) + 1
    body = []
    for model, step, layer in dict.fromkeys(key[:3] for key in rates):
        if layer is not None:
            heads = [*range(num_heads), None]
            cells = [rates.get((model, step, layer, head)) for head in heads]
            body.append([f"`{model}`", str(layer), step, *("" if aer is None else f"{100 * aer:.1f}" for aer in cells)])
    return table(["model", "layer", "step", *(f"head {head}" for head in range(num_heads)), "mean of heads"], body)


def draw(result: Result, folder: Path) -> None:
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
            low, high = (100 * end for end in row["interval"])
            axes.plot([low, high], [index - 0.22] * 2, color=style.ORANGE)
            axes.plot(100 * row["aer"], index - 0.22, "D", color=style.ORANGE)
        elif row["kind"] == "map" and row["head"] is not None:
            if row["step"] == "writes":
                axes.plot(100 * row["aer"], index, "o", color=style.BLUE)
            else:
                axes.plot(100 * row["aer"], index + 0.22, "s", color=style.GREEN, markerfacecolor="none")
