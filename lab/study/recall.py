"""Measure how long the served chat models keep an instruction, see `lab.zoo.recall`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.bench.style import WIDTH, describe, save, style
from lab.study.bleu import percent
from lab.study.chats import LINES, METHOD
from lab.study.served import Served, serve
from lab.zoo.dialogues import CONDITIONS
from lab.zoo.instructions import KINDS, QUESTIONS
from lab.zoo.recall import MAX_ANSWER_TOKENS, SEED, TURNS, Answer, recall
from lab.zoo.systems import bundle_name
from sightline.base.bundle import MANIFEST
from sightline.model.evaluation.result import Share

NAME = "recall"
UNSEEN = "unseen values"
PLAIN = f"{UNSEEN}, plain earlier responses"  # the responses before the last one ignore the instruction
CASES = (*CONDITIONS, PLAIN)
# Kinds whose value only the last message asks for, so that earlier responses do not hold it.
ASKED = tuple(kind for kind in KINDS if kind in QUESTIONS)
SPREAD = 0.2  # turns between the points of one turn, so that none hides another


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with some of {', '.join(map(bundle_name, LINES))}")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS, help="lengths of the dialogues")
    text = "number of dialogues for each condition, kind of instruction and length"
    parser.add_argument("--dialogues", type=int, default=20, help=text)
    parser.add_argument("--seed", type=int, default=SEED, help="random seed of the dialogues")


def measure(arguments: argparse.Namespace) -> Result:
    """Send the same dialogues to all models of a folder over the service's HTTP API."""
    names = [name for name in LINES if (arguments.bundles / bundle_name(name) / MANIFEST).is_file()]
    if not names:
        raise FileNotFoundError(f"{arguments.bundles} has none of {', '.join(map(bundle_name, LINES))}")
    with serve(arguments.bundles) as served:
        return Result(rows=[row for name in names for row in _measure_model(served, name, arguments)])


def _measure_model(served: Served, name: str, arguments: argparse.Namespace) -> list[Row]:
    print(name, flush=True)
    answer = served_responses(served, bundle_name(name))
    options = (arguments.turns, arguments.dialogues, arguments.seed)
    plain = recall(answer, *options, {UNSEEN: CONDITIONS[UNSEEN]}, after_plain_answers=True)
    counts = {**recall(answer, *options), PLAIN: plain[UNSEEN]}
    return [
        {"system": name, "condition": condition, "turn": int(turn), **kinds["all"]}
        | {"kept_by_kind": [kinds[kind]["kept"] for kind in KINDS]}
        for condition, turns in counts.items()
        for turn, kinds in turns.items()
    ]


def served_responses(served: Served, name: str) -> Answer:
    """Return a function that gets a served model's greedy responses."""
    body = {"model": name, "parameters": {"max_new_tokens": MAX_ANSWER_TOKENS}}

    def answer(prompts: Sequence[str]) -> list[str]:
        return [output["text"] for output in served.outputs("/v1/generate", body, prompts)]

    return answer


def tables(result: Result) -> Mapping[str, str]:
    """Return the tables of shares with intervals: by turn, and by kind of instruction.

    The short table has all conditions of the first model, and unseen values of the others. The
    table by kind has the first model at the last turn of the training.
    """
    measured = {(row["system"], row["condition"], row["turn"]): row for row in result.rows}
    turns = sorted({turn for *_, turn in measured})
    body = {
        (name, condition): [label, condition, *(_share(measured[name, condition, turn]) for turn in turns)]
        for name, (label, *_) in LINES.items()
        if (name, UNSEEN, turns[0]) in measured
        for condition in CASES
    }
    (first, _), *_ = body
    short = [
        [label.replace(f" {METHOD}", ""), *cells]
        for (name, condition), (label, *cells) in body.items()
        if name == first or condition == UNSEEN
    ]
    columns = ["dialogues", *(f"turn {turn}" for turn in turns)]
    written = {
        NAME: table([METHOD, *columns], short),
        f"{NAME}-all": table(["model", *columns], list(body.values())),
    }
    if TURNS[-1] in turns:
        written[f"{NAME}-kinds"] = _kinds_table([measured[first, condition, TURNS[-1]] for condition in CASES])
    return written


def _kinds_table(rows: Sequence[Row]) -> str:
    """Return the number of dialogues that follow each kind of instruction, by condition, and the
    share of the kinds that are asked for.
    """
    body = []
    for row in rows:
        kept = dict(zip(KINDS, row["kept_by_kind"], strict=True))
        share = Share(sum(kept[kind] for kind in ASKED), row["total"] * len(ASKED) // len(KINDS))
        counts = [str(kept[kind]) for kind in KINDS]
        body.append([row["condition"], *counts, f"{share.count}: {percent(share.value, share.interval)}"])
    size = rows[0]["total"] // len(KINDS)
    together = f"{', '.join(ASKED[:-1])} and {ASKED[-1]}, of {size * len(ASKED)}: %"
    return table(["dialogues", *(f"{kind}, of {size}" for kind in KINDS), together], body)


def _share(row: Mapping[str, Any]) -> str:
    return percent(row["kept"] / row["total"], row["interval_95"])


def draw(result: Result, folder: Path) -> None:
    """Write `recall.svg`: a panel for each condition, with shares and intervals over the turns."""
    with style():
        figure, grid = pyplot.subplots(2, 3, figsize=(WIDTH, 5.2), sharex=True, sharey=True)
        for condition, axes in zip(CASES, grid.flat, strict=True):
            _draw_condition(axes, [row for row in result.rows if row["condition"] == condition])
            axes.set_title(condition.replace(", ", ",\n"))
        for axes in grid[-1]:
            axes.set_xlabel("turn of the dialogue")
        for axes in grid[:, 0]:
            axes.set_ylabel("dialogues, %")
        describe(
            figure,
            "Dialogues whose last response follows the instruction of the first turn",
            "Bars are Wilson's 95 % intervals. Points of one turn are shifted sideways.",
            legend=grid[0, 0].get_legend_handles_labels()[0],
        )
        save(figure, folder / "recall.svg")


def _draw_condition(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    turns = sorted({row["turn"] for row in rows})
    for index, (name, (label, colour, marker)) in enumerate(LINES.items()):
        series = [row for row in rows if row["system"] == name]
        if not series:
            continue
        x = [row["turn"] + SPREAD * (index - 1) for row in series]
        shares = [100 * row["kept"] / row["total"] for row in series]
        # Rounding may put the end of an interval slightly beyond a share of 0 or 100 %.
        ends = [
            [max(0.0, share - 100 * row["interval_95"][0]) for share, row in zip(shares, series, strict=True)],
            [max(0.0, 100 * row["interval_95"][1] - share) for share, row in zip(shares, series, strict=True)],
        ]
        axes.errorbar(x, shares, ends, label=label, color=colour, marker=marker, elinewidth=1)
    axes.set_xticks(turns, [str(turn) for turn in turns])
    axes.set_ylim(-4, 104)
