"""Measure how long the served chat models keep an instruction; see `model.evaluation.recall` for
the test itself.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.record import Result
from bench.report import table
from bench.style import WIDTH, describe, save, style, use_log_scale
from model.data.instructions import KINDS
from model.evaluation.defaults import SEED, TURNS
from model.evaluation.recall import MAX_ANSWER_TOKENS, Answer, recall
from model.systems import bundle_name
from study.chats import LINES, MODELS, TITLES
from study.served import Served, serve

NAME = "recall"
# The first turn contains the instruction itself and shows if the model learned it. Training
# dialogues have at most 20 turns.
ASKED_AT = [1, *TURNS, 30]
EARLIER = {"own": "its own", "plain": "plain"}  # source of the responses before the last one
LINE_STYLES = {"own": ("-", True), "plain": (":", False)}  # line style, True for filled markers
SPREAD = 1.035  # factor between the horizontal positions of the points of one turn, so that none hides another


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {' and '.join(map(bundle_name, MODELS))}")
    parser.add_argument("--turns", type=int, nargs="+", default=ASKED_AT, help="lengths of the dialogues")
    parser.add_argument("--dialogues", type=int, default=40, help="number of dialogues for each instruction and length")
    parser.add_argument("--seed", type=int, default=SEED, help="random seed of the dialogues")


def measure(arguments: argparse.Namespace) -> Result:
    """Send the same dialogues to both models over the service's HTTP API.

    Raises:
        ValueError: A model is missing, or a dialogue exceeds a model's limit.
    """
    with serve(arguments.bundles) as served:
        rows = [
            row
            for name in MODELS
            for earlier in EARLIER
            for row in _measure_model(
                served_responses(served, bundle_name(name)), {"model": name, "earlier_answers": earlier}, arguments
            )
        ]
    return Result(rows=rows)


def _measure_model(answer: Answer, facts: Mapping[str, Any], arguments: argparse.Namespace) -> list[Mapping[str, Any]]:
    turns, num_dialogues, seed = arguments.turns, arguments.dialogues, arguments.seed
    counts = recall(answer, turns, num_dialogues, seed, after_plain_answers=facts["earlier_answers"] == "plain")
    return [
        {**facts, "seed": seed, "turn": int(turn), "instruction": kind, **count}
        for turn, kinds in counts.items()
        for kind, count in kinds.items()
    ]


def served_responses(served: Served, name: str) -> Answer:
    """Return a function that gets a served model's greedy responses."""
    body = {"model": name, "parameters": {"max_new_tokens": MAX_ANSWER_TOKENS}}

    def answer(prompts: Sequence[str]) -> list[str]:
        return [output["text"] for output in served.outputs("/v1/generate", body, prompts)]

    return answer


def tables(result: Result) -> Mapping[str, str]:
    """Return the table of counts and intervals: one column for each turn."""
    turns = sorted({row["turn"] for row in result.rows})
    found = {_case(row): row for row in result.rows}
    body = [
        [label, EARLIER[earlier], kind, *(_share(found[name, earlier, kind, turn]) for turn in turns)]
        for name, label in MODELS.items()
        for earlier in EARLIER
        for kind in (*KINDS, "all")
    ]
    return {NAME: table(["model", "earlier responses", "instruction", *(f"turn {turn}" for turn in turns)], body)}


def _case(row: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return row["model"], row["earlier_answers"], row["instruction"], row["turn"]


def _share(row: Mapping[str, Any]) -> str:
    low, high = (round(100 * end) for end in row["interval_95"])
    return f"{row['kept']} of {row['total']} ({low} to {high} %)"


def draw(result: Result, folder: Path) -> None:
    """Write `recall.svg`: a panel for each kind of instruction, with shares and intervals over the
    turns.
    """
    with style():
        figure, grid = pyplot.subplots(2, 2, figsize=(WIDTH, 5.6), sharex=True, sharey=True)
        for kind, axes in zip(KINDS, grid.flat, strict=True):
            _draw_kind(axes, [row for row in result.rows if row["instruction"] == kind])
            axes.set_title(TITLES[kind])
        for axes in grid[-1]:
            axes.set_xlabel("turn of the dialogue (logarithmic)")
        for axes in grid[:, 0]:
            axes.set_ylabel("dialogues, %")
        describe(
            figure,
            "Dialogues whose last response follows the instruction of the first turn",
            "Each panel is one kind of instruction. Bars are Wilson's 95 % intervals. "
            "Points of one turn are shifted sideways.",
            legend=grid[0, 0].get_legend_handles_labels()[0],
        )
        save(figure, folder / "recall.svg")


def _draw_kind(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    turns = sorted({row["turn"] for row in rows})
    use_log_scale(axes, "x")
    for index, (name, earlier) in enumerate((name, earlier) for name in MODELS for earlier in EARLIER):
        series = [row for row in rows if (row["model"], row["earlier_answers"]) == (name, earlier)]
        x = [row["turn"] * SPREAD ** (index - 1.5) for row in series]
        shares = [100 * row["kept"] / row["total"] for row in series]
        # Rounding may put the end of an interval slightly beyond a share of 0 or 100 %.
        ends = [
            [max(0.0, share - 100 * row["interval_95"][0]) for share, row in zip(shares, series, strict=True)],
            [max(0.0, 100 * row["interval_95"][1] - share) for share, row in zip(shares, series, strict=True)],
        ]
        label, colour, marker = LINES[name]
        line, is_filled = LINE_STYLES[earlier]
        axes.errorbar(
            x,
            shares,
            ends,
            label=f"{label}, {EARLIER[earlier]} earlier responses",
            color=colour,
            linestyle=line,
            marker=marker,
            markerfacecolor=colour if is_filled else "white",
            elinewidth=1,
        )
    axes.set_xticks(turns, [str(turn) for turn in turns])
    axes.set_ylim(-4, 104)
