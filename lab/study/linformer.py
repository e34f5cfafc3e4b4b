"""Measure time and memory of Linformer's attention and softmax attention in one layer, for n tokens
and k projected keys.

Each attention of a case runs in its own process with the service's session options; the processes
take turns.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lab.bench.process import JsonWorker
from lab.bench.record import Result
from lab.study.attention_graphs import RESULT, exported_graph, plain_graph, save, without_maps
from lab.study.linformer_report import draw, tables
from sightline.base.machine import usable_threads
from sightline.export.graphs.builder import WeightFile
from sightline.model.config import TransformerConfig
from sightline.model.layers.linformer import LinformerAttention, Projections
from sightline.model.layers.multi_head_attention import MultiHeadAttention

__all__ = ["NAME", "add_arguments", "draw", "measure", "tables"]

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
    """A kind of attention: the exported operator, plain products, or Linformer with the exported
    operator.
    """

    attention: Literal["operator", "plain", "linformer"]
    slots: int | None = None
    has_maps: bool = False  # compute and fetch the attention maps


def variants_of(rows: int, tokens: int) -> list[Variant]:
    """Return the variants to compare; Linformers have fewer projected keys than tokens."""
    exported = [Variant("operator"), *(Variant("linformer", slots) for slots in SLOTS if slots < tokens)]
    fits = 4 * scores_bytes(rows, tokens) <= MAX_SCORES_BYTES
    with_maps = [Variant(one.attention, one.slots, has_maps=True) for one in exported if rows == 1 and fits]
    return [*exported, Variant("plain"), *with_maps]


def scores_bytes(rows: int, tokens: int) -> int:
    """Return the size of the matrix of the softmax attention scores of all heads."""
    return rows * NUM_HEADS * tokens * tokens * FLOAT_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds; each figure is their median")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths n")
    parser.add_argument("--threads", type=int, default=usable_threads(), help="threads of each process")


def measure(arguments: argparse.Namespace) -> Result:
    """Measure all cases.

    Raises:
        ValueError: Rounds, threads or tokens are less than 1.
    """
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
            peaks = [process.request(task)["peak_mb"] for process, task in zip(processes, whole, strict=True)]
            seconds = _rounds(processes, whole, rounds)
            measured = [
                _row(variant, rows, tokens, peak, one)
                for variant, peak, one in zip(variants, peaks, seconds, strict=True)
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
        for index, one in zip(chosen, seconds, strict=True):
            measured[index][name] = _milliseconds(one)


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


def _row(variant: Variant, rows: int, tokens: int, peak_mb: float, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "rows": rows,
        "tokens": tokens,
        "attention": variant.attention,
        "slots": variant.slots,
        "maps": variant.has_maps,
        "ms": _milliseconds(seconds),
        "peak_mb": round(peak_mb, 1),
    }


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [round(1000 * one, 4) for one in seconds]


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
    """Write the graph of one layer with new weights; its projections accept at most `tokens`
    tokens.
    """
    folder.mkdir(parents=True)
    module, projections = modules(variant, tokens)
    with WeightFile(folder / "weights.bin") as weights:
        if variant.attention == "plain":
            assert isinstance(module, MultiHeadAttention), "plain products have no projections"
            return save(plain_graph(module, weights), folder)
        graph = exported_graph(module, projections, weights)
        return save(graph if variant.has_maps else without_maps(graph), folder)


def modules(variant: Variant, tokens: int) -> tuple[MultiHeadAttention | LinformerAttention, Projections | None]:
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
        return LinformerAttention(D_MODEL, NUM_HEADS).eval(), Projections(config)
