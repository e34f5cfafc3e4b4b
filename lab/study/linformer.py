"""Measure time and memory of Linformer's and softmax attention, by tokens n and projected keys k.

Each attention of a case runs in its own process with the service's session options; the processes
take turns.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes

from lab.bench.process import JsonWorker
from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.bench.style import (
    BLACK,
    BLUE,
    GREY,
    WIDTH,
    LineLabel,
    describe,
    format_number,
    label_lines,
    save,
    style,
    use_log_scale,
)
from lab.study.attention_graphs import RESULT, exported_graph, plain_graph, save_graph, without_maps
from sightline.base.machine import usable_threads
from sightline.export.graphs.builder import WeightFile
from sightline.model.config import TransformerConfig
from sightline.model.layers.linformer import Projections
from sightline.model.layers.multi_head_attention import MultiHeadAttention

NAME = "linformer"
D_MODEL, NUM_HEADS = 256, 4  # heads of 64, as in the paper
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
SLOTS = (32, 64, 128, 256)
ROWS = (1, 8)
SHORT = 20  # tokens of a short sentence
MAX_SCORES_BYTES = 1 << 30  # cases with a larger n x n matrix are skipped; with maps, the limit is a quarter of it
FLOAT_BYTES = 4
AT_LEAST_S = 0.05
SEED = 4


@dataclass(frozen=True)
class Variant:
    """Kind of attention: the exported operator, plain products, or Linformer with the operator."""

    attention: Literal["operator", "plain", "linformer"]
    slots: int | None = None
    has_maps: bool = False  # compute and fetch the attention maps


def variants_of(rows: int, tokens: int) -> list[Variant]:
    """Return the variants to compare; Linformers have fewer projected keys than tokens."""
    exported = [Variant("operator"), *(Variant("linformer", slots) for slots in SLOTS if slots < tokens)]
    fits = 4 * scores_bytes(rows, tokens) <= MAX_SCORES_BYTES
    with_maps = [Variant(variant.attention, variant.slots, has_maps=True) for variant in exported if rows == 1 and fits]
    return [*exported, Variant("plain"), *with_maps]


def scores_bytes(rows: int, tokens: int) -> int:
    """Return the size of the matrix of the softmax attention scores of all heads."""
    return rows * NUM_HEADS * tokens * tokens * FLOAT_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds; each figure is their median")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths n")
    parser.add_argument("--threads", type=int, default=usable_threads(), help="threads of each process")


def measure(arguments: argparse.Namespace) -> Result:
    if min(arguments.rounds, arguments.threads, *arguments.tokens) < 1:
        raise ValueError("rounds, threads and tokens must be at least 1")
    rows: list[dict[str, Any]] = [
        {"d_model": D_MODEL, "num_heads": NUM_HEADS, "threads": arguments.threads, "short": SHORT}
    ]
    for count in ROWS:
        for tokens in arguments.tokens:
            if scores_bytes(count, tokens) > MAX_SCORES_BYTES:
                continue
            print(f"{count} x {tokens}", flush=True)
            rows += _measure_case(count, tokens, arguments.rounds, arguments.threads)
    return Result(rows=rows)


def _measure_case(rows: int, tokens: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    variants = variants_of(rows, tokens)
    with tempfile.TemporaryDirectory() as scratch:
        graphs = [write_graph(variant, tokens, Path(scratch) / str(index)) for index, variant in enumerate(variants)]
        with _running(graphs, threads) as processes:
            whole = [_task(variant, rows, tokens, tokens) for variant in variants]
            peaks = [process.request(task)["peak_mib"] for process, task in zip(processes, whole, strict=True)]
            seconds = _rounds(processes, whole, rounds)
            measured = [
                _row(variant, rows, tokens, peak, times)
                for variant, peak, times in zip(variants, peaks, seconds, strict=True)
            ]
            if rows == 1:
                _add_short(measured, variants, processes, tokens, rounds)
    return measured


def _add_short(
    measured: Sequence[dict[str, Any]],
    variants: Sequence[Variant],
    processes: Sequence[JsonWorker],
    tokens: int,
    rounds: int,
) -> None:
    """Add the time for a short sentence: at its own length, and padded to all `tokens`."""
    chosen = [index for index, variant in enumerate(variants) if not variant.has_maps and variant.attention != "plain"]
    for name, read in (("short_ms", SHORT), ("padded_ms", tokens)):
        tasks = [_task(variants[index], 1, read, SHORT) for index in chosen]
        seconds = _rounds([processes[index] for index in chosen], tasks, rounds)
        for index, times in zip(chosen, seconds, strict=True):
            measured[index][name] = _milliseconds(times)


def _rounds(processes: Sequence[JsonWorker], tasks: Sequence[dict[str, Any]], rounds: int) -> list[list[float]]:
    """Return the seconds of each process, one value for each round."""
    seconds: list[list[float]] = [[] for _ in processes]
    for _ in range(rounds):
        for process, task, mine in zip(processes, tasks, seconds, strict=True):
            mine.append(process.request(task)["seconds"])
    return seconds


def _task(variant: Variant, rows: int, tokens: int, length: int) -> dict[str, Any]:
    outputs = [] if variant.has_maps else [RESULT]  # an empty list requests all outputs
    return {"rows": rows, "tokens": tokens, "length": length, "outputs": outputs, "at_least_s": AT_LEAST_S}


def _row(variant: Variant, rows: int, tokens: int, peak_mib: float, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "rows": rows,
        "tokens": tokens,
        "attention": variant.attention,
        "slots": variant.slots,
        "maps": variant.has_maps,
        "ms": _milliseconds(seconds),
        "peak_mib": round(peak_mib, 1),
    }


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [round(1000 * duration, 4) for duration in seconds]


@contextlib.contextmanager
def _running(graphs: Sequence[Path], threads: int) -> Iterator[list[JsonWorker]]:
    """Start a process for each graph, and end them when the block ends."""
    with contextlib.ExitStack() as stack:
        processes = []
        for graph in graphs:
            arguments = ["lab.study.attention_worker", str(graph), "--threads", str(threads)]
            process = JsonWorker(arguments, os.environ)
            stack.callback(process.end)
            process.wait_until_ready()
            processes.append(process)
        yield processes


def write_graph(variant: Variant, tokens: int, folder: Path) -> Path:
    """Write the graph of a layer with new weights; its projections accept `tokens` at most."""
    folder.mkdir(parents=True)
    module, projections = modules(variant, tokens)
    with WeightFile(folder / "weights.bin") as weights:
        if variant.attention == "plain":
            return save_graph(plain_graph(module, weights), folder)
        graph = exported_graph(module, projections, weights)
        return save_graph(graph if variant.has_maps else without_maps(graph), folder)


def modules(variant: Variant, tokens: int) -> tuple[MultiHeadAttention, Projections | None]:
    """Return the layer in PyTorch and, for a Linformer, its projections with E = F."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        if variant.slots is None:
            return MultiHeadAttention(D_MODEL, NUM_HEADS).eval(), None
        config = TransformerConfig(
            vocab_size=3,  # only the special tokens
            d_model=D_MODEL,
            num_heads=NUM_HEADS,
            encoder_layers=1,
            encoder_attention="linformer",
            linformer_size=variant.slots,
            linformer_sharing="layerwise",
            max_positions=tokens,
        )
        return MultiHeadAttention(D_MODEL, NUM_HEADS).eval(), Projections(config)


Measure = Callable[[Row], float]
IsLess = Callable[[Row, Row], bool]

SHOWN = (None, 32, 128)  # numbers of projected keys in the tables of times; the picture has all
BASELINES = {"operator": "softmax, one operator", "plain": "softmax, single operators"}
LINES = {  # by kind: colour, marker
    ("operator", None): (BLUE, "o"),
    ("plain", None): (GREY, "s"),
    ("linformer", 32): ("#e8945a", "^"),
    ("linformer", 64): ("#d55e00", "v"),
    ("linformer", 128): ("#a34700", "D"),
    ("linformer", 256): ("#5e2900", "P"),
}


def milliseconds(row: Row) -> float:
    return float(statistics.median(row["ms"]))


def peak_mib(row: Row) -> float:
    return float(row["peak_mib"])


def is_faster(ours: Row, theirs: Row) -> bool:
    """Return True if all rounds but at most one are faster. Rounds are paired, so a disturbance
    affects both.
    """
    lost = [our >= their for our, their in zip(ours["ms"], theirs["ms"], strict=True)]
    return lost.count(True) <= min(1, (len(lost) - 1) // 2)


def is_smaller(ours: Row, theirs: Row) -> bool:
    """Return True if the peak is at least one MiB lower; less is noise of a single measurement."""
    return peak_mib(ours) <= peak_mib(theirs) - 1


def crossover(is_less: Mapping[int, bool]) -> str:
    """Return the smallest length from which `is_less` holds at all longer measured ones."""
    if not is_less:
        return "not measured"
    tokens = [length for length in sorted(is_less) if all(less for other, less in is_less.items() if other >= length)]
    return f"{tokens[0]:,}" if tokens else f"none up to {max(is_less):,}"


def tables(result: Result) -> Mapping[str, str]:
    """Return the tables of time and memory, crossovers, the cost of maps, and a short sentence."""
    facts, *rows = result.rows
    plain, with_maps = [row for row in rows if not row["maps"]], [row for row in rows if row["maps"]]
    counts = list(dict.fromkeys(row["rows"] for row in rows))
    head = (
        f"One layer, width {facts['d_model']}, {facts['num_heads']} heads, projections included, float32, "
        f"{facts['threads']} {'thread' if facts['threads'] == 1 else 'threads'}, one row; medians of "
        f"{len(rows[0]['ms'])} rounds."
    )
    return {
        "linformer": f"{head}\n\n{_grid(_with_rows(plain, 1), _cell, 'ms, MiB')}",
        "linformer-crossover": _crossovers(plain, counts),
        "linformer-maps": _grid(with_maps, _with_over_without(plain), "ms (ratio), MiB"),
        "linformer-short": _short(facts["short"], [row for row in plain if "short_ms" in row]),
    }


def _with_rows(rows: Sequence[Row], count: int) -> list[Row]:
    return [row for row in rows if row["rows"] == count]


def _kind(row: Row) -> tuple[str, int | None]:
    return row["attention"], row["slots"]


def _label(kind: tuple[str, int | None]) -> str:
    attention, slots = kind
    return BASELINES[attention] if slots is None else f"Linformer, k = {slots}"


def _kinds(rows: Sequence[Row]) -> list[tuple[str, int | None]]:
    """Return the kinds of attention: baselines, then Linformers by number of projected keys."""
    return sorted({_kind(row) for row in rows}, key=lambda kind: (kind[1] or 0, kind[0]))


def _grid(rows: Sequence[Row], cell: Callable[[Row], str], units: str) -> str:
    """Return a table with a row for each length and a column for each kind of attention."""
    kinds = [kind for kind in _kinds(rows) if kind[1] in SHOWN]
    measured = {(row["tokens"], _kind(row)): row for row in rows}
    lengths = sorted({row["tokens"] for row in rows})
    body = [
        [f"{tokens:,}", *(cell(measured[tokens, kind]) if (tokens, kind) in measured else "" for kind in kinds)]
        for tokens in lengths
    ]
    return table(["n", *(f"{_label(kind)}: {units}" for kind in kinds)], body)


def _cell(row: Row) -> str:
    return f"{_number(milliseconds(row))}, {peak_mib(row):,.0f}"


def _with_over_without(plain: Sequence[Row]) -> Callable[[Row], str]:
    """Return a cell function: time with maps, its ratio to the time without, and peak memory."""
    by_case = {(row["rows"], row["tokens"], _kind(row)): row for row in plain}

    def cell(row: Row) -> str:
        without = by_case[row["rows"], row["tokens"], _kind(row)]
        return f"{_number(milliseconds(row))} ({milliseconds(row) / milliseconds(without):.1f}), {peak_mib(row):,.0f}"

    return cell


def _number(value: float) -> str:
    """Format with three significant digits, and never fewer than those before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _crossovers(rows: Sequence[Row], counts: Sequence[int]) -> str:
    """Return a table by projected keys; cells have the lengths for each number of rows."""
    body = []
    for size in sorted({row["slots"] for row in rows if row["slots"] is not None}):
        cells = []
        for is_less in (is_faster, is_smaller):
            for name in BASELINES:
                lengths = [
                    crossover(
                        _compare(
                            [row for row in _with_rows(rows, count) if row["slots"] == size],
                            _baseline(rows, count, name),
                            is_less,
                        )
                    )
                    for count in counts
                ]
                cells.append(" / ".join(lengths))
        body.append([str(size), *cells])
    head = [f"{word} than {name}" for word in ("faster", "smaller") for name in BASELINES.values()]
    return table(["k", *head], body)


def _baseline(rows: Sequence[Row], count: int, name: str) -> list[Row]:
    return [row for row in _with_rows(rows, count) if row["attention"] == name]


def _compare(ours: Sequence[Row], theirs: Sequence[Row], is_less: IsLess) -> dict[int, bool]:
    """Compare at each length at which both were measured."""
    by_length = {row["tokens"]: row for row in theirs}
    return {row["tokens"]: is_less(row, by_length[row["tokens"]]) for row in ours if row["tokens"] in by_length}


def _short(tokens: int, rows: Sequence[Row]) -> str:
    """Return the sentence on a short text, at its own length and padded to the longest one."""
    longest = max(row["tokens"] for row in rows)
    times = [
        f"{_label(_kind(row))} {_number(statistics.median(row['short_ms']))}"
        + ("" if row["slots"] is None else f" ({_number(statistics.median(row['padded_ms']))} padded)")
        for row in rows
        if row["tokens"] == longest and row["slots"] in SHOWN
    ]
    return f"Milliseconds for {tokens} tokens, in a layer for at most {longest:,}: {', '.join(times)}."


def draw(result: Result, folder: Path) -> None:
    """Write `linformer.svg`: time and memory of one row by the number of tokens."""
    _, *rows = result.rows
    rows = [row for row in rows if row["rows"] == 1 and not row["maps"]]
    with style():
        figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(WIDTH, 6.6))
        upper.set_title("Time")
        lower.set_title("Peak memory of the process")
        title = "One attention layer over one sequence, by the length of the sequence"
        describe(figure, title, "Both axes are logarithmic. k is the number of projected keys of a Linformer.")
        _draw_lines(upper, rows, milliseconds, "milliseconds, median")
        _draw_lines(lower, rows, peak_mib, "MiB")
        save(figure, folder / "linformer.svg")


def _draw_lines(axes: Axes, rows: Sequence[Row], measure: Measure, unit: str) -> None:
    use_log_scale(axes, "x")
    use_log_scale(axes, "y")
    labels = []
    for kind in _kinds(rows):
        values = {row["tokens"]: measure(row) for row in rows if _kind(row) == kind}
        colour, marker = LINES.get(kind, (BLACK, "x"))
        axes.plot(list(values), list(values.values()), marker=marker, color=colour)
        labels.append(LineLabel(_label(kind), max(values), values[max(values)], colour))
    lengths = sorted({row["tokens"] for row in rows})
    axes.set_xticks(lengths, [format_number(tokens) for tokens in lengths])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel(unit)
    label_lines(axes, labels)
