"""Test if attention of the pronoun "it" prefers its noun, in pairs that differ in one word."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.bench.style import WIDTH, describe, save, style
from lab.study.bleu import mean_with_interval, percent
from lab.study.maps import Weights, array_of, draw_cells, rollout
from lab.study.runs import system_of
from lab.study.served import Served, served_models
from sightline.base.text.words import merge_weights, words_of

NAME = "pronouns"
PRONOUN = "it"
LEAST_MOVE = 1e-4  # far above rounding; in the first layer, the last word of a sentence cannot move the attention
# Both nouns are in brackets. Of the last two words, the first makes "it" the first noun and the
# second makes it the second noun.
PAIRS = Path(__file__).with_name("pronouns.txt")


@dataclass(frozen=True)
class Pair:
    """Two sentences with the same two nouns; `it` is the first noun in the first sentence, and the
    second noun in the second sentence.
    """

    sentences: tuple[str, str]
    nouns: tuple[str, str]


def read_pairs() -> list[Pair]:
    return [_pair_of(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


def _pair_of(line: str) -> Pair:
    first, second = re.findall(r"\[(\w+)\]", line)
    endings = re.search(r"<(\w+)\|(\w+)>", line)
    assert endings is not None, f"{line!r} has no pair of words"
    plain = re.sub(r"[\[\]]", "", line)
    sentence, other = (plain.replace(endings[0], ending) for ending in endings.groups())
    return Pair((sentence, other), (first, second))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of bundles; models without maps of encoder self-attention between tokens are skipped"
    parser.add_argument("bundles", type=Path, nargs="+", help=text)


def measure(arguments: argparse.Namespace) -> Result:
    """Read the attention of the pronouns over the service's HTTP API."""
    pairs = read_pairs()
    rows: list[Row] = []
    for served, manifest in served_models(*arguments.bundles):
        if any(maps.kind == "encoder" and maps.normalized for maps in manifest.attention):
            rows += summary(manifest.name, preferences(served, manifest.name, pairs))
    return Result(rows=rows)


def preferences(served: Served, model: str, pairs: Sequence[Pair]) -> Weights:
    """Return (P, 2, L, H + 2): for each sentence of each pair and each layer, all heads, their
    mean, and the rollout up to the layer.

    The values are the difference of the weights from the pronoun to the two nouns, divided by their
    sum: 1 if it attends only to the first one, -1 if only to the second one.
    """
    sentences = [text for pair in pairs for text in pair.sentences]
    body = {"model": model, "kinds": ["encoder"], "encoding": "base64"}
    differences = []
    for number, output in enumerate(served.outputs("/v1/attention", body, sentences)):
        weights = array_of(output["maps"][0])
        columns = (weights, weights.mean(axis=1, keepdims=True), rollout(weights)[:, None])
        every = np.concatenate(columns, axis=1)  # (L, H + 2, S, S)
        words = words_of(sentences[number], output["source_offsets"])
        names = [word.text for word in words]
        row, first, second = (words[names.index(word)].tokens for word in (PRONOUN, *pairs[number // 2].nouns))
        (merged,) = np.moveaxis(merge_weights(every.astype(np.float32), [row], [first, second]), -2, 0)
        difference, both = merged[..., 0] - merged[..., 1], merged.sum(axis=-1)
        differences.append(np.divide(difference, both, out=np.zeros_like(both), where=both > 0))
    return np.array(differences, np.float64).reshape(len(pairs), 2, *differences[0].shape)


def summary(model: str, differences: Weights) -> list[Row]:
    """Return a row for each entry of `CHOICES`, and one with the counts of all heads, from
    `preferences`.
    """
    num_pairs, _, layers, columns = differences.shape
    flat = differences.reshape(num_pairs, 2, -1)
    correct = np.stack((flat[:, 0] > 0, flat[:, 1] < 0), axis=1)  # (P, 2, L (H + 2))
    moved = flat[:, 0] > flat[:, 1] + LEAST_MOVE  # (P, L (H + 2))
    is_head = np.tile(np.arange(columns) < columns - 2, layers)
    pairs, rows = np.arange(num_pairs), list[Row]()
    for name, choice in CHOICES.items():
        chosen = choice(moved, is_head)
        quantities = {
            "correct": (2, correct[pairs, :, chosen].sum(axis=1)),
            "both": (1, correct[pairs, :, chosen].all(axis=1)),
            "moved": (1, moved[pairs, chosen]),
        }
        figures = {
            quantity: mean_with_interval(np.column_stack((np.full(num_pairs, size), values)))
            for quantity, (size, values) in quantities.items()
        }
        rows.append({"model": model, "heads": name, **figures})
    counts = moved.sum(axis=0).reshape(layers, columns).tolist()
    return [*rows, {"model": model, "heads": None, "pairs": num_pairs, "moved": counts}]


def _best_of_same(moved: NDArray[np.bool_], is_head: NDArray[np.bool_]) -> NDArray[np.intp]:
    return np.full(len(moved), np.where(is_head, moved.mean(axis=0), -1).argmax())


def _best_of_others(moved: NDArray[np.bool_], is_head: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Choose a head for each half of the pairs on the other half."""
    halves = np.arange(len(moved)) % 2
    best = [_best_of_same(moved[halves != half], is_head)[0] for half in (0, 1)]
    return np.array(best)[halves]


# The column of each pair, chosen from `moved` (P, columns).
CHOICES = {
    "mean of the last layer": lambda moved, is_head: np.full(len(moved), len(is_head) - 2),
    "rollout": lambda moved, is_head: np.full(len(moved), len(is_head) - 1),
    "best head, chosen on the other half": _best_of_others,
    "best head, chosen on the same pairs": _best_of_same,
}
SHOWN = {  # names in the table; the last choice is only a comparison for the one before it
    "mean of the last layer": "last layer",
    "rollout": "rollout",
    "best head, chosen on the other half": "head that moves most",
}


def tables(result: Result) -> Mapping[str, str]:
    head = ["system", "attention of", "noun correct, %", "both correct, %", "weight moves to the noun meant, %"]
    body = [
        [
            f"`{system_of(row['model'])}`",
            SHOWN[row["heads"]],
            *(percent(row[name]["value"], row[name]["interval"], digits=1) for name in ("correct", "both", "moved")),
        ]
        for row in result.rows
        if row["heads"] in SHOWN
    ]
    baseline = [["nearest noun", "", "50", "0", ""], ["chance", "", "50", "25", "50"]]
    return {NAME: table(head, [*body, *baseline])}


def draw(result: Result, folder: Path) -> None:
    """Write `pronouns.svg`: the number of pairs in which the weight moves, by layer and head."""
    rows = [row for row in result.rows if row["heads"] is None]
    heights = [len(row["moved"]) + 1.5 for row in rows]
    with style():
        figure, panels = pyplot.subplots(
            len(rows), 1, figsize=(WIDTH, 0.24 * sum(heights) + 0.8), height_ratios=heights, squeeze=False
        )
        for axes, row in zip(panels[:, 0], rows, strict=True):
            counts = np.array(row["moved"], np.float64)
            columns = [*(f"head {head}" if counts.shape[1] < 10 else str(head) for head in range(counts.shape[1] - 2))]
            axes.set_title(f"{system_of(row['model'])}, {row['pairs']} pairs")
            draw_cells(axes, counts, [*columns, "mean", "rollout"], "{:.0f}".format, row["pairs"])
        note = "The number expected by chance is half of the pairs."
        describe(figure, "Pairs in which the attention of “it” moves to the noun that it refers to", note)
        save(figure, folder / "pronouns.svg")
