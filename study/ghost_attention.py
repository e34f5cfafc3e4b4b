"""How much the answers of the served models that chat look at the instruction, over the turns of a dialogue.

Llama 2's Figure 10 (Touvron et al. 2023, section 3.3) shows the largest weights across the network, neighbouring tokens
binned together, over one dialogue with Ghost Attention and without. Here the instruction is one bin and the answer
another, and dialogues are many. Shapes use L layers, H heads, N tokens of an answer, C tokens read before its last one.
"""

import argparse
import base64
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bench.plots import save
from bench.record import Result
from bench.report import table
from model.data.dialogues import CHAT
from model.data.instructions import KINDS
from model.evaluation.recall import MAX_ANSWER_TOKENS, SEED, Script, draw_script
from model.evaluation.share import Z_95
from model.systems import bundle_name
from study.chats import COLOURS, MODELS
from study.served import Served, serve

NAME = "ghost-attention"
PARAMETERS = {"max_new_tokens": MAX_ANSWER_TOKENS}
TURNS_OF_TABLE = (1, 2, 4, 6, 10, 20)
LABELS = {"largest": "largest weight on the instruction", "share": "mean share of attention, %"}


@dataclass(frozen=True)
class Look:
    """How much one answer looks at the instruction: the mean over the answer's tokens, the end token included."""

    largest: float  # weight on any of the instruction's tokens, in any head and layer
    share: float  # of the weights, %: the sum over the instruction's tokens, the mean over heads and layers
    uniform: float  # that share where all tokens had the same weight, %


def look_of(weights: NDArray[np.float32], columns: Sequence[int]) -> Look:
    """Weights (L, H, N, C), of which the instruction's tokens have these columns."""
    of_instruction = weights[..., list(columns)]
    rows, last = weights.shape[2:]
    read = np.arange(last - rows + 1, last + 1)  # (N,) tokens that each token of the answer follows
    return Look(
        largest=float(of_instruction.max(axis=(0, 1, 3)).mean()),
        share=100 * float(of_instruction.sum(axis=3).mean()),
        uniform=100 * float((len(columns) / read).mean()),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {' and '.join(map(bundle_name, MODELS))}")
    parser.add_argument("--dialogues", type=int, default=25, help="of each kind of instruction")
    parser.add_argument("--turns", type=int, default=20, help="of each dialogue")
    parser.add_argument("--seed", type=int, default=SEED, help="of the dialogues")


def measure(arguments: argparse.Namespace) -> Result:
    """Let both models lead the same dialogues, each with its own answers, and read the maps of every answer.

    Raises:
        ValueError: there are no such models, a dialogue became too long for one, or fewer than two dialogues.
    """
    if arguments.dialogues < 2:
        raise ValueError("an interval needs at least two dialogues")
    facts = {name: getattr(arguments, name) for name in ("dialogues", "seed")}
    rows = []
    with serve(arguments.bundles) as served:
        for name in MODELS:
            for kind in KINDS:
                rng = Random(arguments.seed)
                scripts = [draw_script(rng, kind, arguments.turns) for _ in range(arguments.dialogues)]
                looks = follow(served, bundle_name(name), scripts)
                rows.append({"model": name, "instruction": kind, **facts, **_summary(looks)})
    return Result(rows=rows)


def follow(served: Served, name: str, scripts: Sequence[Script]) -> list[list[Look]]:
    """Lead every dialogue to its end; of each turn, how each dialogue's answer looks at the instruction."""
    columns = [instruction_columns(served, name, script) for script in scripts]
    looks = []
    for _ in scripts[0].plain:
        bodies = [
            {"model": name, "input": one.prompt, "kinds": ["decoder"], "encoding": "base64", "parameters": PARAMETERS}
            for one in scripts
        ]
        answers = served.post("/v1/attention", *bodies)
        looks.append([look_of(_weights(one), places) for one, places in zip(answers, columns, strict=True)])
        for script, one in zip(scripts, answers, strict=True):
            script.hear(one["text"])
    return looks


def instruction_columns(served: Served, name: str, script: Script) -> list[int]:
    """Where the instruction's tokens stand in what the model reads; in every turn at the same places."""
    start = CHAT.user.index("{}")
    end = start + len(script.instruction.text)
    body = {"model": name, "inputs": script.prompt, "add_special_tokens": True}
    ((tokens,),) = (answer["outputs"] for answer in served.post("/v1/tokenize", body))
    return [place for place, token in enumerate(tokens) if start < token["end"] <= end]


def _weights(answer: Mapping[str, Any]) -> NDArray[np.float32]:
    """The one map of an answer, (L, H, N, C)."""
    (found,) = answer["maps"]
    return np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])


def _summary(looks: Sequence[Sequence[Look]]) -> dict[str, Any]:
    """Of each turn the mean over dialogues, and how far its 95 % interval reaches to either side."""
    summary: dict[str, Any] = {}
    for field in fields(Look):
        values = [[getattr(look, field.name) for look in of_turn] for of_turn in looks]
        summary[field.name] = [round(statistics.mean(one), 4) for one in values]
        summary[f"{field.name}_half_width"] = [
            round(Z_95 * statistics.stdev(one) / len(one) ** 0.5, 4) for one in values
        ]
    return summary


def tables(result: Result) -> Mapping[str, str]:
    """The largest weights with their intervals, a column a turn."""
    turns = [turn for turn in TURNS_OF_TABLE if turn <= len(result.rows[0]["largest"])]
    body = [
        [row["instruction"], MODELS[row["model"]], *(_with_interval(row, turn - 1) for turn in turns)]
        for kind in KINDS
        for row in result.rows
        if row["instruction"] == kind
    ]
    return {NAME: table(["instruction", "model", *(f"turn {turn}" for turn in turns)], body)}


def _with_interval(row: Mapping[str, Any], place: int) -> str:
    return f"{row['largest'][place]:.3f} ± {row['largest_half_width'][place]:.3f}"


def draw(result: Result, folder: Path) -> None:
    """`ghost-attention.svg`: a column a kind of instruction, a row a measure, over the turns."""
    figure, axes = pyplot.subplots(len(LABELS), len(KINDS), figsize=(9, 4.5), sharex=True, sharey="row")
    for of_measure, (measured, label) in zip(axes, LABELS.items(), strict=True):
        for axis, kind in zip(of_measure, KINDS, strict=True):
            _draw_kind(axis, [row for row in result.rows if row["instruction"] == kind], measured)
        of_measure[0].set_ylabel(label)
    for axis, kind in zip(axes[0], KINDS, strict=True):
        axis.set_title(kind)
    for axis in axes[-1]:
        axis.set_xlabel("turn")
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    axes[1, 0].legend(frameon=False, fontsize=6)
    save(figure, folder / "ghost-attention.svg")


def _draw_kind(axis: Axes, rows: Sequence[Mapping[str, Any]], measured: str) -> None:
    for row in rows:
        means, half_widths = np.array(row[measured]), np.array(row[f"{measured}_half_width"])
        turns = range(1, len(means) + 1)
        axis.plot(turns, means, color=COLOURS[row["model"]], label=MODELS[row["model"]])
        axis.fill_between(
            turns, means - half_widths, means + half_widths, color=COLOURS[row["model"]], alpha=0.25, linewidth=0
        )
        if measured == "share":
            label = "the same weight for every token" if row is rows[-1] else None
            axis.plot(turns, row["uniform"], color=COLOURS[row["model"]], linestyle=":", linewidth=0.8, label=label)
