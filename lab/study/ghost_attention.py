"""Attention from the responses of the served chat models to the instruction, over the turns.

Figure 10 of Llama 2 (Touvron et al. 2023, section 3.3) shows the largest weights of the whole
network for one dialogue with Ghost Attention and without, with neighbouring tokens binned. Here,
the instruction is one bin and the response another, over many dialogues. Shapes use L layers, H
heads, N tokens of a response, C tokens before its last one.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from lab.bench.record import Result
from lab.bench.report import table
from lab.bench.style import WIDTH, describe, save, style
from lab.study.chats import LINES, METHOD, PAIR
from lab.study.maps import Weights, array_of
from lab.study.served import Served, serve
from lab.zoo.dialogues import CHAT, CONDITIONS, draw_parts
from lab.zoo.instructions import KINDS, Kind
from lab.zoo.recall import MAX_ANSWER_TOKENS, SEED, Script
from lab.zoo.systems import bundle_name
from sightline.model.evaluation.result import Z_95

NAME = "ghost-attention"
PARAMETERS = {"max_new_tokens": MAX_ANSWER_TOKENS}
TURNS_OF_TABLE = (1, 2, 20)
TURNS_OF_LONG_TABLE = (1, 2, 4, 6, 10, 20)
LABELS = {"largest": "largest weight on the instruction", "share": "mean share of attention, %"}


@dataclass(frozen=True)
class InstructionAttention:
    """Attention of a response to the instruction, averaged over its tokens with the end token."""

    largest: float  # largest weight on a token of the instruction, over all heads and layers
    share: float  # weight in percent: summed over the instruction's tokens, averaged over heads and layers
    uniform: float  # the share in percent if all tokens had the same weight


def instruction_attention(weights: Weights, columns: Sequence[int]) -> InstructionAttention:
    """Summarize the weights (L, H, N, C) of a response; `columns` are those of the instruction."""
    of_instruction = weights[..., list(columns)]
    rows, last = weights.shape[2:]
    read = np.arange(last - rows + 1, last + 1)  # (N,) number of tokens before each token of the response
    return InstructionAttention(
        largest=float(of_instruction.max(axis=(0, 1, 3)).mean()),
        share=100 * float(of_instruction.sum(axis=3).mean()),
        uniform=100 * float((len(columns) / read).mean()),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {' and '.join(map(bundle_name, PAIR))}")
    parser.add_argument("--dialogues", type=int, default=25, help="number of dialogues for each kind of instruction")
    parser.add_argument("--turns", type=int, default=20, help="number of turns of each dialogue")
    parser.add_argument("--seed", type=int, default=SEED, help="random seed of the dialogues")


def measure(arguments: argparse.Namespace) -> Result:
    """Run the same dialogues with both models and read the attention of every response. Each model
    continues from its own earlier responses. Values of instructions are unseen ones.
    """
    if arguments.dialogues < 2:
        raise ValueError(f"--dialogues must be at least 2 to give an interval, got {arguments.dialogues}")
    facts = {name: getattr(arguments, name) for name in ("dialogues", "seed")}
    rows = []
    with serve(arguments.bundles) as served:
        for name in PAIR:
            for kind in KINDS:
                rng = Random(arguments.seed)
                scripts = [draw_script(rng, kind, arguments.turns) for _ in range(arguments.dialogues)]
                by_turn = run_dialogues(served, bundle_name(name), scripts)
                rows.append({"model": name, "instruction": kind, **facts, **_summary(by_turn)})
    return Result(rows=rows)


def draw_script(rng: Random, kind: Kind, num_turns: int) -> Script:
    return Script(*draw_parts(rng, kind, num_turns, CONDITIONS["unseen values"]))


def run_dialogues(served: Served, name: str, scripts: Sequence[Script]) -> list[list[InstructionAttention]]:
    """Run all dialogues; return the attention of each response to the instruction, by turn."""
    columns = [instruction_columns(served, name, script) for script in scripts]
    by_turn = []
    for _ in scripts[0].plain:
        body = {"model": name, "kinds": ["decoder"], "encoding": "base64", "parameters": PARAMETERS}
        bodies = [{**body, "inputs": script.prompt} for script in scripts]
        outputs = [response["outputs"][0] for response in served.post("/v1/attention", *bodies)]
        by_turn.append(
            [
                instruction_attention(array_of(output["maps"][0]), indices)
                for output, indices in zip(outputs, columns, strict=True)
            ]
        )
        for script, output in zip(scripts, outputs, strict=True):
            script.add_answer(output["text"])
    return by_turn


def instruction_columns(served: Served, name: str, script: Script) -> list[int]:
    """Return the input positions of the instruction's tokens, the same in every turn."""
    start = CHAT.user.index("{}")
    end = start + len(script.instruction.text)
    body = {"model": name, "inputs": script.prompt, "add_special_tokens": True}
    ((tokens,),) = (response["outputs"] for response in served.post("/v1/tokenize", body))
    return [index for index, token in enumerate(tokens) if start < token["end"] <= end]


def _summary(by_turn: Sequence[Sequence[InstructionAttention]]) -> dict[str, Any]:
    """Return, for each turn, the mean over dialogues and the half width of its 95 % interval."""
    summary: dict[str, Any] = {}
    for field in fields(InstructionAttention):
        values = [[getattr(attention, field.name) for attention in of_turn] for of_turn in by_turn]
        summary[field.name] = [round(statistics.mean(of_turn), 4) for of_turn in values]
        summary[f"{field.name}_half_width"] = [
            round(Z_95 * statistics.stdev(of_turn) / len(of_turn) ** 0.5, 4) for of_turn in values
        ]
    return summary


def tables(result: Result) -> Mapping[str, str]:
    """Return a short and a long table of the largest weights with their intervals."""
    return {NAME: _by_model(result), f"{NAME}-all": _by_turn(result, TURNS_OF_LONG_TABLE)}


def _by_model(result: Result) -> str:
    """Return a table with a row for each kind, and a column for each model and turn."""
    turns = [turn for turn in TURNS_OF_TABLE if turn <= len(result.rows[0]["largest"])]
    rows = {(row["instruction"], row["model"]): row for row in result.rows}
    body = [[kind, *(_with_interval(rows[kind, name], turn - 1) for name in PAIR for turn in turns)] for kind in KINDS]
    words = [LINES[name][0].removesuffix(f" {METHOD}") for name in PAIR]
    return table(["instruction", *(f"{word}, turn {turn}" for word in words for turn in turns)], body)


def _by_turn(result: Result, turns: Sequence[int]) -> str:
    """Return a table with a column for each turn that was measured."""
    turns = [turn for turn in turns if turn <= len(result.rows[0]["largest"])]
    body = [
        [row["instruction"], LINES[row["model"]][0], *(_with_interval(row, turn - 1) for turn in turns)]
        for kind in KINDS
        for row in result.rows
        if row["instruction"] == kind
    ]
    return table(["instruction", "model", *(f"turn {turn}" for turn in turns)], body)


def _with_interval(row: Mapping[str, Any], index: int) -> str:
    return f"{row['largest'][index]:.3f} ± {row['largest_half_width'][index]:.3f}"


def draw(result: Result, folder: Path) -> None:
    """Write `ghost-attention.svg`: columns are kinds of instructions, rows are measures by turn."""
    with style():
        figure, grid = pyplot.subplots(len(LABELS), len(KINDS), figsize=(WIDTH, 5.8), sharex=True, sharey="row")
        for of_measure, (measured, label) in zip(grid, LABELS.items(), strict=True):
            for axes, kind in zip(of_measure, KINDS, strict=True):
                _draw_kind(axes, [row for row in result.rows if row["instruction"] == kind], measured)
            of_measure[0].set_ylabel(label)
        for axes, kind in zip(grid[0], KINDS, strict=True):
            axes.set_title(kind)
        for axes in grid[-1]:
            axes.set_xlabel("turn")
            axes.set_xticks([1, 5, 10, 15, 20])
        for axes in grid.flat:
            axes.set_ylim(bottom=0)
        describe(
            figure,
            "Attention from the responses to the instruction of the first turn",
            "Each column is one kind of instruction. Bands are 95 % intervals of the mean over dialogues.",
            legend=grid[1, 0].get_legend_handles_labels()[0],
        )
        save(figure, folder / "ghost-attention.svg")


def _draw_kind(axes: Axes, rows: Sequence[Mapping[str, Any]], measured: str) -> None:
    for row in rows:
        means, half_widths = np.array(row[measured]), np.array(row[f"{measured}_half_width"])
        turns = np.arange(1, 1 + len(means))
        label, colour, marker = LINES[row["model"]]
        axes.plot(turns, means, color=colour, marker=marker, markevery=4, label=label)
        axes.fill_between(turns, means - half_widths, means + half_widths, color=colour, alpha=0.25, linewidth=0)
        if measured == "share":
            equal = f"{label}, if all weights were equal"
            axes.plot(turns, row["uniform"], color=colour, linestyle=":", linewidth=1.2, label=equal)
