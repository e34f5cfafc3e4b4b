"""Statistics of attention heads: entropy, weight on the end, rollout, and singular values."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.bench.style import BLACK, BLUE, GREEN, GREY, ORANGE, WIDTH, describe, save, style
from lab.study.bleu import interval, percent, resamples, with_interval
from lab.study.maps import Weights, array_of, cumulative, draw_cells, entropies, rollout, share_of_rank
from lab.study.runs import SOURCE, system_of
from lab.study.served import Served, served_models
from lab.zoo.dialogues import draw_dialogues
from lab.zoo.recall import SEED
from lab.zoo.systems import MULTI30K
from sightline.base.bundle import Manifest
from sightline.model.data.text import read_lines
from sightline.model.evaluation.defaults import TEST_SPLIT

NAME = "heads"
MARKS = ".!?"
MAX_WORDS = 60  # of the prompt of a chat model; the maps of longer ones exceed the limit of a response
JOINED = 6  # sentences of a long text, about 90 tokens
SHARE = 0.9  # of the sum of singular values
GRID = np.linspace(0.05, 1, 20)  # share of the singular values, of the curves
KINDS = {"encoder": "encoder", "cross": "cross-attention", "decoder": "decoder"}
TITLES = {"entropy": "entropy, bits", "special": "weight on the start token", "end": "weight on final mark and end"}
ENDS = ("special", "end")  # quantities that are weights
COLOURS = (BLUE, ORANGE, GREEN, BLACK, GREY, "#cc79a7")  # of layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, nargs="+", help="folders of bundles; models without maps are skipped")
    parser.add_argument("--data", type=Path, required=True, help="folder with the test set")
    parser.add_argument("--sentences", type=int, default=100, help="number of test sentences, from the first one")


def measure(arguments: argparse.Namespace) -> Result:
    """Read the maps of the test sentences; chat models read as many generated messages."""
    sentences = read_lines(arguments.data / f"{TEST_SPLIT}.{SOURCE}")[: arguments.sentences]
    prompts = [dialogue.prompt for dialogue in draw_dialogues(SEED, 4 * len(sentences), has_ghost_attention=True)]
    prompts = [prompt for prompt in prompts if len(prompt.split()) <= MAX_WORDS][: len(sentences)]
    long = [" ".join(sentences[start : start + JOINED]) for start in range(0, len(sentences), JOINED)]
    rows: list[Row] = []
    for served, manifest in served_models(*arguments.bundles):
        kinds = [maps.kind for maps in manifest.attention if maps.kind in KINDS and maps.normalized]
        if kinds:
            print(manifest.name, flush=True)
            outputs = _outputs(served, manifest, prompts if manifest.is_decoder_only else sentences, kinds)
            rows += statistics_of_heads(manifest.name, outputs)
        if "encoder" in kinds:
            texts = {"sentences": outputs, "long": _outputs(served, manifest, long, ["encoder"])}
            rows += [singular_values(manifest.name, text, maps) for text, maps in texts.items()]
    return Result(rows=rows)


def _outputs(served: Served, manifest: Manifest, inputs: Sequence[str], kinds: Sequence[str]) -> list[Any]:
    body: dict[str, Any] = {"model": manifest.name, "kinds": kinds, "encoding": "base64"}
    if manifest.is_decoder_only:
        body["prompt_rows"] = True
    return served.outputs("/v1/attention", body, inputs, per_call=1)  # long texts have large maps


def statistics_of_heads(model: str, outputs: Sequence[Any]) -> list[Row]:
    """Return a row for each kind and quantity: means over all rows of the maps with intervals, by
    layer and column. The columns are the heads and the rollout.
    """
    collected: dict[tuple[str, str], list[Weights]] = {}
    for output in outputs:
        for kind, every in maps_with_rollout(output).items():
            special, end = end_columns(output, kind)
            values = {"entropy": entropies(every), "special": every[..., special].sum(axis=-1)}
            if kind != "decoder":
                values["end"] = every[..., end].sum(axis=-1)
            for quantity, of_rows in values.items():
                pair = np.stack((np.full(of_rows.shape[:2], of_rows.shape[2]), of_rows.sum(axis=-1)))
                collected.setdefault((kind, quantity), []).append(pair)  # (2, L, columns)
    return [
        {"model": model, "kind": kind, "quantity": quantity, "texts": len(pairs), **_means(np.array(pairs))}
        for (kind, quantity), pairs in collected.items()
    ]


def maps_with_rollout(output: Mapping[str, Any]) -> dict[str, Weights]:
    """Return the maps of an output by kind, with the rollout as another head, (L, H + 1, R, C).

    The rollout of cross-attention is the mean over the heads of a layer times the rollout of the
    whole encoder. A cross-attention map without an encoder map has no rollout, (L, H, R, C).
    """
    maps = {entry["kind"]: array_of(entry) for entry in output["maps"]}
    with_rollout = {}
    for kind, weights in maps.items():
        if kind != "cross":
            rolled = rollout(weights)
        elif "encoder" in maps:
            rolled = weights.mean(axis=1) @ rollout(maps["encoder"])[-1]
        else:
            with_rollout[kind] = weights
            continue
        with_rollout[kind] = np.concatenate((weights, rolled[:, None]), axis=1)
    return with_rollout


def end_columns(output: Mapping[str, Any], kind: str) -> tuple[list[int], list[int]]:
    """Return the columns of special tokens, and those together with the mark that ends the text."""
    if kind == "decoder":
        return [0], [0]  # the start token
    tokens = output["source_tokens"]
    special = [index for index, offsets in enumerate(output["source_offsets"]) if offsets is None]
    last = max(set(range(len(tokens))) - set(special), default=None)
    is_mark = last is not None and tokens[last].strip() in tuple(MARKS)
    return special, [*special, *([last] if is_mark and last is not None else [])]


def _means(pairs: Weights) -> dict[str, Any]:
    """Return means and the ends of their intervals, by layer and column, from numbers of rows and
    sums over them (N, 2, L, columns).
    """
    counts, totals = pairs[:, 0], pairs[:, 1]
    samples = resamples(len(pairs)).astype(np.float64)
    drawn = np.tensordot(samples, totals, 1) / np.tensordot(samples, counts, 1)  # (R, L, columns)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    parts = {"value": totals.sum(axis=0) / counts.sum(axis=0), "low": low, "high": high}
    return {name: [[round(float(number), 4) for number in layer] for layer in part] for name, part in parts.items()}


def singular_values(model: str, text: str, outputs: Sequence[Any]) -> Row:
    """Return the share of the singular values that have 90 % of their sum, by layer and head, and
    the cumulative curve of each layer; both also after shuffling the weights of each row.
    """
    rng = np.random.default_rng(SEED)
    sizes, ranks, curves = [], [], []
    for output in outputs:
        (weights,) = (array_of(maps) for maps in output["maps"] if maps["kind"] == "encoder")
        both = [weights, rng.permuted(weights, axis=-1)]
        size = weights.shape[-1]
        sizes.append(size)
        ranks.append([[[share_of_rank(head, SHARE) for head in layer] for layer in maps] for maps in both])
        each = [[[cumulative(head) for head in layer] for layer in maps] for maps in both]
        grid = np.arange(1, size + 1) / size
        curves.append([[np.mean([np.interp(GRID, grid, x) for x in layer], axis=0) for layer in maps] for maps in each])
    values, mean_curves = np.array(ranks), np.array(curves).mean(axis=0)  # (N, 2, L, H), (2, L, G)
    layers = values.mean(axis=3)  # (N, 2, L)
    drawn = np.tensordot(resamples(len(layers)) / len(layers), layers, 1)  # (R, 2, L)
    ends = [[interval(drawn[:, kind, layer]) for layer in range(layers.shape[2])] for kind in (0, 1)]
    return {
        "model": model,
        "kind": "encoder",
        "quantity": "singular values",
        "text": text,
        "texts": len(values),
        "tokens": round(float(np.mean(sizes)), 1),
        "heads": _rounded(values[:, 0].mean(axis=0)),
        "layers": _rounded(layers[:, 0].mean(axis=0)),
        "shuffled": _rounded(layers[:, 1].mean(axis=0)),
        "interval": _rounded(np.array(ends[0])),
        "shuffled_interval": _rounded(np.array(ends[1])),
        "curves": _rounded(mean_curves[0]),
        "shuffled_curves": _rounded(mean_curves[1]),
    }


def _rounded(values: Weights) -> Any:
    return np.round(values, 4).tolist()


def tables(result: Result) -> Mapping[str, str]:
    return {
        "heads": _statistics_table(result.rows),
        "heads-end": _end_table(result.rows),
        "singular-values": _ranks_table(result.rows),
    }


def _statistics_table(rows: Sequence[Row]) -> str:
    statistics = {(row["model"], row["kind"], row["quantity"]): row for row in rows if "value" in row}
    head = [
        *("system", "maps", "entropy, bits: mean (heads)", "weight on the end, %: mean (heads)"),
        *("on special tokens, %: mean", "rollout: entropy, bits", "rollout: weight on the end, %"),
    ]
    body = []
    for model, kind in dict.fromkeys((model, kind) for model, kind, _ in statistics):
        has_rollout = kind != "cross" or (model, "encoder", "entropy") in statistics
        entropy_row, special = statistics[model, kind, "entropy"], statistics[model, kind, "special"]
        end = special if kind == "decoder" else statistics[model, kind, "end"]
        cells = [_spread(row, has_rollout) for row in (entropy_row, end)]
        cells.append(f"{100 * _heads(special, has_rollout).mean():.0f}")
        cells += [_rollout_cell(row) if has_rollout else "" for row in (entropy_row, end)]
        body.append([f"`{system_of(model)}`", KINDS[kind], *cells])
    entropy, share = (_widest([row for row in rows if row["quantity"] in names]) for names in (["entropy"], ENDS))
    text = f"Intervals of single heads are at most ± {entropy:.2f} bits and ± {100 * share:.0f} %."
    return f"{table(head, body)}\n\n{text}"


def _widest(rows: Sequence[Row]) -> float:
    """Return the longest side of the intervals of all heads."""
    sides = [
        max(value - low, high - value)
        for row in rows
        for value, low, high in zip(*(np.ravel(row[name]) for name in ("value", "low", "high")), strict=True)
    ]
    return float(max(sides))


def _end_table(rows: Sequence[Row]) -> str:
    """Return the weight on the end by layer and head of all models but the one with a picture."""
    body = []
    with_encoder = {row["model"] for row in rows if row["kind"] == "encoder"}
    for row in rows:
        wanted = "special" if row["kind"] == "decoder" else "end"
        if row["model"] != MULTI30K.name and row["quantity"] == wanted:
            for layer, values in enumerate(row["value"]):
                has_rollout = row["kind"] != "cross" or row["model"] in with_encoder
                heads = values[:-1] if has_rollout else values
                cells = ", ".join(f"{100 * value:.0f}" for value in heads)
                body.append([f"`{system_of(row['model'])}`", KINDS[row["kind"]], str(layer), cells])
    return table(["system", "maps", "layer", "weight on the end by head, %"], body)


def _spread(row: Row, has_rollout: bool) -> str:
    """Format the mean over the heads, and the smallest and largest head."""
    heads = _heads(row, has_rollout)
    scale, digits = (1, 2) if row["quantity"] == "entropy" else (100, 0)
    mean, least, most = (f"{scale * number:.{digits}f}" for number in (heads.mean(), heads.min(), heads.max()))
    return mean if heads.size == 1 else f"{mean} ({least} to {most})"


def _heads(row: Row, has_rollout: bool) -> Weights:
    """Return the values by layer and head, without the rollout, (L, H)."""
    values = np.array(row["value"])
    return values[:, :-1] if has_rollout else values


def _rollout_cell(row: Row) -> str:
    """Format the rollout up to the last layer."""
    value, low, high = (row[name][-1][-1] for name in ("value", "low", "high"))
    if row["quantity"] == "entropy":
        return with_interval(value, (low, high), digits=2)
    return percent(value, (low, high))


def _ranks_table(rows: Sequence[Row]) -> str:
    """Return the shares of all layers, and a sentence with the widest interval."""
    rows = [row for row in rows if row["quantity"] == "singular values"]
    layers = max(len(row["layers"]) for row in rows)
    body = []
    for row in rows:
        cells = [
            f"{100 * value:.0f}" + (f" ({100 * min(heads):.0f} to {100 * max(heads):.0f})" if len(heads) > 1 else "")
            for value, heads in zip(row["layers"], row["heads"], strict=True)
        ]
        cells += [""] * (layers - len(cells))
        ends = [f"{100 * end(row['shuffled']):.0f}" for end in (min, max)]
        shuffled = " to ".join(dict.fromkeys(ends))
        texts = [str(row["texts"]), f"{row['tokens']:.0f}"]
        body.append([f"`{system_of(row['model'])}`", *texts, *cells, shuffled])
    head = ["system", "texts", "tokens", *(f"layer {layer}" for layer in range(layers)), "shuffled, all layers"]
    widest = max(
        max(value - low, high - value)
        for row in rows
        for values, limits in (("layers", "interval"), ("shuffled", "shuffled_interval"))
        for value, (low, high) in zip(row[values], row[limits], strict=True)
    )
    return f"{table(head, body)}\n\nIntervals are at most ± {100 * widest:.1f}."


def draw(result: Result, folder: Path) -> None:
    """Write `heads.svg`, the heads of the shipped model, and `singular-values.svg`."""
    shipped = [row for row in result.rows if row["model"] == MULTI30K.name and "value" in row]
    if shipped:
        _draw_heads(shipped, folder / "heads.svg")
    if rows := [row for row in result.rows if row.get("text") == "long"]:
        _draw_curves(rows, folder / "singular-values.svg")


def _draw_heads(rows: Sequence[Row], path: Path) -> None:
    with style():
        quantities = ("entropy", "end")
        figure, panels = pyplot.subplots(len(KINDS), len(quantities), figsize=(WIDTH, 5.2))
        for panel_row, (kind, title) in zip(panels, KINDS.items(), strict=True):
            for axes, quantity in zip(panel_row, quantities, strict=True):
                chosen = "special" if kind == "decoder" and quantity == "end" else quantity
                (row,) = (row for row in rows if (row["kind"], row["quantity"]) == (kind, chosen))
                values = np.array(row["value"])
                columns = [*(f"head {head}" for head in range(values.shape[1] - 1)), "rollout"]
                cell, top = ("{:.1f}".format, 3.5) if quantity == "entropy" else ("{:.0%}".format, 1.0)
                axes.set_title(f"{title}: {TITLES[chosen]}")
                draw_cells(axes, values, columns, cell, top)
        describe(figure, "The heads of the shipped model", f"Means over {rows[0]['texts']} test sentences.")
        save(figure, path)


def _draw_curves(rows: Sequence[Row], path: Path) -> None:
    with style():
        figure, panels = pyplot.subplots(1, len(rows), figsize=(WIDTH, 3.4), sharey=True, squeeze=False)
        for axes, row in zip(panels[0], rows, strict=True):
            axes.set_title(f"{system_of(row['model'])}, {row['tokens']:.0f} tokens")
            for layer, colour in zip(range(len(row["curves"])), COLOURS, strict=False):
                axes.plot(100 * GRID, row["curves"][layer], color=colour, label=f"layer {layer}")
                axes.plot(100 * GRID, row["shuffled_curves"][layer], color=colour, linestyle=":")
            axes.set_ylim(0, 1.02)
            axes.legend(loc="lower right")
        panels[0][0].set_ylabel("share of their sum")
        note = "Horizontal: % of the singular values, largest first. Dotted: the weights of each row shuffled."
        describe(figure, "Singular values of encoder maps, mean over texts and heads", note)
        save(figure, path)
